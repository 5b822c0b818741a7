"""What an operation is: a pure rule from specs to costs, attached to the NumPy body that it describes."""

from functools import lru_cache, wraps

from npinfer.ledger import record
from npinfer.specs import Array, Spec


def operation(rule):
    """Attach a pure rule to the NumPy body it describes.

    The rule maps the operands' specs (and the static keyword parameters) to
    the spec, or specs, of the result and to ((op, Counts), ...).  It is asked
    once for each combination and remembered.  The body gets the operands'
    data, and is not run where there is none.
    """
    rule = lru_cache(maxsize=2**14)(rule)

    def attach(body):
        @wraps(body)
        def call(*operands, **static):
            out, costs = rule(*[x.spec for x in operands], **static)
            record(costs)
            if operands[0].data is None:
                return Array(out) if out.__class__ is Spec else [Array(part) for part in out]
            result = body(*[x.data for x in operands], **static)
            return Array(out, result) if out.__class__ is Spec else list(map(Array, out, result))

        call.rule = rule
        return call

    return attach


NOTHING = Array(None)  # the operand of an architecture that does not have it
