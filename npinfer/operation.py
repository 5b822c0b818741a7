"""What an operation is: a pure rule from specs to costs, attached to the NumPy body that it describes."""

from functools import lru_cache, partial, update_wrapper, wraps

from npinfer.ledger import current
from npinfer.specs import Array, Spec

MOST_KNOWN = 2**14  # combinations of operands that an operation remembers


def operation(rule):
    """Attach a pure rule to the NumPy body it describes.

    The rule maps the operands' specs (and the static keyword parameters) to
    the spec, or specs, of the result and to ((op, Counts), ...).  It is asked
    once for each combination and remembered.  The body gets the operands'
    data, and is not run where there is none.

    What it makes has them as `rule` and `__wrapped__`.  Where there are static
    parameters, `fixed(**static)` gives the operation with these set, one object
    for equal ones: what a layer holds, and hands nothing but operands.
    """

    def attach(body):
        if not body.__code__.co_kwonlyargcount:
            return _counted(rule, body)

        @lru_cache(maxsize=2**10)
        def fixed(**static):
            return _counted(partial(rule, **static), partial(body, **static))

        @wraps(body)
        def call(*operands, **static):
            return fixed(**static)(*operands)

        call.rule, call.fixed = rule, fixed
        return call

    return attach


def _counted(rule, body):
    known = {}  # specs of operands -> what the rule said

    # Most of the time between two products is spent here and in the bodies, and what they touch the weights have
    # driven out of the cache: plain steps of the interpreter are done sooner than cleverer ones.
    def call(*operands):
        specs, data = [], []
        for x in operands:
            specs.append(x.spec)
            data.append(x.data)
        specs = tuple(specs)
        found = known.get(specs)
        if found is None:
            if len(known) >= MOST_KNOWN:  # another thread may have gone past it
                known.clear()
            found = known[specs] = rule(*specs)
        out, costs = found
        for write in current().writers:
            write(costs)
        result = None if data[0] is None else body(*data)
        if out.__class__ is Spec:
            return Array(out, result)
        return [Array(part) for part in out] if result is None else list(map(Array, out, result))

    call = update_wrapper(call, getattr(body, "func", body))  # with settings a body is a partial, without a name
    call.rule, call.__wrapped__ = rule, body
    return call


NOTHING = Array(None)  # the operand of an architecture that does not have it
