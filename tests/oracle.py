"""What the tests of single operations share: a case of one, and five things that must be true of it.

What it computes is held against its definition in float64 or in plain loops;
the FLOPs that its rule declares against an oracle that watches the body execute
(`tally`); its results against the specs that the rule promises.  A test file
draws a `Case` and hands it to each of `CHECKS`.
"""

from typing import Callable, NamedTuple

import numpy as np
from hypothesis import strategies as st
from tally import Tally, values

from npinfer.formats import FORMATS, Format
from npinfer.ledger import Ledger
from npinfer.specs import Array, spec
from npinfer.weights import Matrix

FP32 = FORMATS["fp32"]
BITS = {
    "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4,
    "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5, "q4_k": 4.5, "q6_k": 6.5625, "mxfp4": 4.25,
}  # fmt: skip

dims = st.integers(1, 5)
windows = st.none() | st.integers(1, 6)


def numbers(*shape, seed=0):
    """Normally distributed float32, the same for the same shape and seed."""
    return np.random.default_rng((*shape, seed)).standard_normal(shape, dtype=np.float32)


def n_retained(n_past, window):
    """Rows that a layer still holds after `n_past` positions."""
    return n_past if window is None else min(n_past, window - 1)


def n_scales(shape, format_):
    """fp16 scales: one for each row of int8, one for each 128 (or rest) of a row of int4."""
    per_row = {"int8": 1, "int4": len(range(0, shape[-1], 128))}.get(str(format_), 0)
    return per_row * sum(1 for _ in np.ndindex(*shape[:-1]))


def stored(shape, format_):
    """Bytes of an array, rounded up to whole ones, and of its scales."""
    return int(-(-np.prod(shape) * BITS[format_] // 8)) + 2 * n_scales(shape, format_)


def vectors_of(format_):
    """Format of gains and biases beside matrices of this one."""
    return FORMATS["fp16"] if BITS[format_] < 16 else format_


# ---- matrices


# int4 with its groups cut short, so that small rows have several, and a last one that is not full
matrix_formats = st.sampled_from([FP32, FORMATS["int8"], Format("int4 by twos", 4, group=2)])


def a_matrix(names, d_outs, d_in, format_=FP32, bias=False, seed=0):
    """Joined projections: their specs in pairs, and a `Matrix` of values."""
    stops, total = np.cumsum(d_outs).tolist(), sum(d_outs)
    n_groups = {"int8": 1, "int4 by twos": len(range(0, d_in, 2))}.get(str(format_))
    pairs = tuple(
        (spec((d_out, d_in), format_, "weight", name), spec((d_out,), FP32, "weight", name) if bias else None)
        for name, d_out in zip(names, d_outs)
    )
    return pairs, Matrix(
        numbers(total, d_in, seed=seed),
        n_groups and numbers(total, n_groups, seed=seed),
        numbers(1, total, seed=seed)[0] if bias else None,
        tuple(np.s_[:, stop - d_out : stop] for d_out, stop in zip(d_outs, stops)),
        format_,
        tiled=bool(format_.group),
    )


def unscaled(matrix, row, column):
    """The weight that a code stands for."""
    if matrix.scales is None:
        return float(matrix.rows[row, column])
    return float(matrix.rows[row, column]) * float(matrix.scales[row, column // 2 if matrix.format.group else 0])


def multiplied(x, w):
    """x times the rows of a matrix, and its bias, element by element: (N, sum of d_out)."""
    out = np.zeros((len(x), len(w.rows)))
    for i, j, k in np.ndindex(*out.shape, x.shape[1]):
        out[i, j] += float(x[i, k]) * unscaled(w, j, k)
    return out + (0 if w.bias is None else w.bias)


# ---- one case: an operation, operands for it, and the answer by definition


class Case(NamedTuple):
    op: Callable
    specs: tuple
    operands: tuple
    static: dict
    reference: Callable

    def rule(self):
        return self.op.rule(*self.specs, **self.static)

    def run(self, wrap=lambda x: x):
        """Run the body alone, its model data wrapped; constants and token ids are handed on as they are."""
        roles = [getattr(x, "role", "weight") for x in self.specs]
        operands = [x if role in ("token", "constant") else wrapped(x, wrap) for x, role in zip(self.operands, roles)]
        return self.op.__wrapped__(*operands, **self.static)

    def parts(self, wrap=lambda x: x):
        """The same as a list of results: some operations give several."""
        return listed(self.run(wrap))


def listed(result):
    return list(result) if isinstance(result, list | tuple) else [result]


def wrapped(operand, wrap):
    """An operand with all its arrays wrapped: one, those of a matrix, of several, or none."""
    if isinstance(operand, Matrix):
        return operand._replace(**{field: wrapped(getattr(operand, field), wrap) for field in ("rows", "scales", "bias")})
    if isinstance(operand, tuple):
        return tuple([wrapped(each, wrap) for each in operand])
    return operand if operand is None else wrap(operand)


def flops(costs):
    return sum(counts.matmul_flops for _, counts in costs), sum(counts.elementwise_flops for _, counts in costs)


# ---- what must be true of every case


def rule_declares_the_flops_that_the_body_executes(case):
    tally = Tally()
    watched = case.parts(tally.watch)
    assert flops(case.rule()[1]) == tally.flops
    for seen, out in zip(watched, case.parts(), strict=True):  # watched or not, it is the same computation
        np.testing.assert_allclose(values(seen), out, rtol=2e-5, atol=2e-6)


def body_computes_its_definition(case):
    parts, expected = case.parts(), case.reference(*case.operands)
    for out, right in zip(parts, expected if len(parts) > 1 else [expected], strict=True):
        np.testing.assert_allclose(out, right, rtol=2e-5, atol=2e-6)


def operation_returns_the_shape_that_its_rule_promises_and_records_its_costs(case):
    specs, costs = case.rule()
    with Ledger() as ledger:
        out = case.op(*map(Array, case.specs, case.operands), **case.static)
        abstract = case.op(*map(Array, case.specs), **case.static)
    assert [(entry.op, entry.counts) for entry in ledger.entries()] == [*costs, *costs]
    for one, other, promised in zip(*map(listed, (out, abstract, specs)), strict=True):
        assert one.data.shape == one.shape == other.shape == promised.shape
        assert other.data is None


class Single(np.ndarray):
    """A float32 array that fails at the first result that is floating and not float32."""

    def __array_ufunc__(self, ufunc, method, *operands, out=(), **options):
        if out:
            options["out"] = tuple(np.asarray(x) for x in out)
        operands = [np.asarray(x) if isinstance(x, Single) else x for x in operands]
        result = getattr(ufunc, method)(*operands, **options)
        assert result.dtype.kind != "f" or result.dtype == np.float32, f"{ufunc.__name__} gave {result.dtype}"
        return out[0] if out else np.asarray(result).view(Single)


def every_intermediate_is_float32(case):
    for out, promised in zip(case.parts(lambda x: x.view(Single)), listed(case.rule()[0]), strict=True):
        assert out.dtype == (np.int64 if promised.role == "token" else np.float32)


def operands_are_left_as_they_were(case):
    def read_only(x):
        x.flags.writeable = False
        return x

    case.run(read_only)  # writing to an operand is an error


CHECKS = (
    rule_declares_the_flops_that_the_body_executes,
    body_computes_its_definition,
    operation_returns_the_shape_that_its_rule_promises_and_records_its_costs,
    every_intermediate_is_float32,
    operands_are_left_as_they_were,
)
