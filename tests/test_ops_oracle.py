"""Every operation of npinfer.ops against three independent answers.

What it computes, against its definition in float64 or in plain loops; the FLOPs
its rule declares, against an oracle that watches the body execute (`tally`);
the bytes its rule declares, against sizes worked out here from shapes and bits.
"""

import re
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import Callable, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tally import Tally, values

from npinfer import activations, attention, ops
from npinfer.config import ModelConfig
from npinfer.errors import ShapeError
from npinfer.formats import ALLOWED, FORMATS, Format, Precision, mixed_format
from npinfer.kvcache import KVCache
from npinfer.ledger import Counts, Ledger
from npinfer.rope import RopeTable
from npinfer.specs import Array, spec
from npinfer.weights import Matrix

FP32 = FORMATS["fp32"]
EPS = 1e-5

dims = st.integers(1, 5)
row_lengths = dims | st.sampled_from([127, 128, 129, 256, 300])  # around int4's groups of 128
windows = st.none() | st.integers(1, 6)
weight_formats, kv_formats, activation_formats = (
    st.sampled_from([FORMATS[name] for name in ALLOWED[field]]) for field in ("weights", "kv", "activations")
)


def numbers(*shape):
    """Normally distributed float32, the same for the same shape."""
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def n_retained(n_past, window):
    """Rows that a layer still holds after `n_past` positions."""
    return n_past if window is None else min(n_past, window - 1)


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
        operands = [x if role in ("token", "constant") else _wrapped(x, wrap) for x, role in zip(self.operands, roles)]
        return self.op.__wrapped__(*operands, **self.static)

    def parts(self, wrap=lambda x: x):
        """The same as a list of results: joined projections give several."""
        out = self.run(wrap)
        return out if isinstance(out, list) else [out]


def _wrapped(operand, wrap):
    if isinstance(operand, Matrix):
        return operand._replace(
            **{field: wrap(x) for field in ("rows", "scales", "bias") if (x := getattr(operand, field)) is not None}
        )
    return wrap(operand)


def flops(costs):
    return sum(counts.matmul_flops for _, counts in costs), sum(counts.elementwise_flops for _, counts in costs)


# int4 with its groups cut short, so that small rows have several, and a last one that is not full
matrix_formats = st.sampled_from([FP32, FORMATS["int8"], Format("int4 by twos", 4, group=2)])


def scales_of(shape, format_):
    """Scales for a matrix of this shape: none, one a row, or one a group."""
    n_groups = {"int8": 1, "int4 by twos": len(range(0, shape[1], 2))}.get(str(format_))
    return n_groups and numbers(shape[0], n_groups)


def unscaled(matrix, row, column):
    """The weight that a code stands for."""
    if matrix.scales is None:
        return float(matrix.rows[row, column])
    return float(matrix.rows[row, column]) * float(matrix.scales[row, column // 2 if matrix.format.group else 0])


@st.composite
def embeds(draw):
    batch, n_new, d, vocab = draw(dims), draw(dims), draw(dims), draw(dims)
    format_ = draw(matrix_formats)
    tokens = np.arange(batch * n_new).reshape(batch, n_new) * 7 % vocab

    def reference(tokens, matrix):
        return [[unscaled(matrix, t, i) for i in range(d)] for t in tokens.ravel()]

    return Case(
        ops.embed,
        (spec((batch, n_new), FP32, "token"), spec((vocab, d), format_, "weight", "embed")),
        (tokens, Matrix(numbers(vocab, d), scales_of((vocab, d), format_), None, (slice(0, vocab),), format_)),
        {},
        reference,
    )


@st.composite
def norms(draw):
    n, d = draw(dims), draw(dims)

    def reference(x, gain):
        x = x.astype(np.float64)
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * gain

    specs = spec((n, d), FP32), spec((d,), FP32, "weight", "attn_norm")
    return Case(ops.rms_norm, specs, (numbers(n, d), numbers(d)), {"eps": EPS}, reference)


@st.composite
def linears(draw):
    n, d_in = draw(dims), draw(dims)
    d_outs = draw(st.lists(dims, min_size=1, max_size=3))
    format_, bias = draw(matrix_formats), draw(st.booleans())
    names = ["q_proj", "k_proj", "v_proj"]
    stops = np.cumsum(d_outs)
    w = Matrix(
        numbers(sum(d_outs), d_in),
        scales_of((sum(d_outs), d_in), format_),
        numbers(1, sum(d_outs))[0] if bias else None,
        tuple(slice(stop - d_out, stop) for d_out, stop in zip(d_outs, stops)),
        format_,
    )
    pairs = tuple(
        (spec((d_out, d_in), format_, "weight", name), spec((d_out,), FP32, "weight", name) if bias else None)
        for d_out, name in zip(d_outs, names)
    )

    def reference(x, w):
        out = np.zeros((n, sum(d_outs)))
        for i, j, k in np.ndindex(*out.shape, d_in):
            out[i, j] += float(x[i, k]) * unscaled(w, j, k)
        out = out + (w.bias if bias else 0)
        parts = np.split(out, stops[:-1], axis=1)
        return parts if len(parts) > 1 else parts[0]

    return Case(ops.linear, (spec((n, d_in), FP32), pairs), (numbers(n, d_in), w), {}, reference)


@st.composite
def ropes(draw):
    batch, n_heads, n_new, half, untouched = draw(dims), draw(dims), draw(dims), draw(dims), draw(st.integers(0, 2))
    shape = batch, n_heads, n_new, 2 * half + untouched
    angles = numbers(n_new, half).astype(np.float64)
    rotation = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def reference(x, rotation):
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)  # a pair is a complex number
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    specs = spec(shape, FP32), spec(rotation.shape, None, "constant")
    return Case(ops.rope, specs, (numbers(*shape), rotation), {}, reference)


def attention_by_definition(q, k, v, scale, window):
    """One query at a time, over a list of the keys that it sees."""
    batch, n_heads, n_new, head_dim = q.shape
    n_keys, group = k.shape[2], n_heads // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.empty((batch, n_new, n_heads, head_dim))
    for b, h, t in np.ndindex(batch, n_heads, n_new):
        position = n_keys - n_new + t
        seen = [j for j in range(n_keys) if j <= position and (window is None or position - j < window)]
        weights = np.exp([scale * (q[b, h, t] @ k[b, h // group, j]) for j in seen])
        out[b, t, h] = (weights / weights.sum()) @ v[b, h // group, seen]
    return out.reshape(batch * n_new, n_heads * head_dim)


@st.composite
def attentions(draw, lengths=dims):
    batch, n_kv_heads, group, head_dim = (draw(st.integers(1, 3)) for _ in range(4))
    n_new, window = draw(lengths), draw(windows)
    n_keys = n_retained(draw(st.integers(0, 6)), window) + n_new
    q_shape = batch, n_kv_heads * group, n_new, head_dim
    kv_shape = batch, n_kv_heads, n_keys, head_dim
    format_ = draw(st.sampled_from([FP32, FORMATS["int8"]]))
    kv, scaled = spec(kv_shape, format_, "kv"), format_ == "int8"
    rows_shape = *kv_shape[:3], head_dim + scaled  # an int8 row has its scale behind its codes

    def reference(q, *rows):
        k, v = [x[..., :-1] * x[..., -1:] if scaled else x for x in rows]
        return attention_by_definition(q, k, v, head_dim**-0.5, window)

    return Case(
        attention.attention,
        (spec(q_shape, FP32), kv, kv),
        (numbers(*q_shape), numbers(*rows_shape), numbers(*rows_shape[::-1]).transpose()),
        {"scale": head_dim**-0.5, "window": window},
        reference,
    )


@st.composite
def residuals(draw):
    shape = draw(dims), draw(dims)
    return Case(
        ops.residual,
        (spec(shape, FP32), spec(shape, FP32)),
        (numbers(*shape), numbers(*shape[::-1]).T),
        {"op": "attn_residual"},
        lambda x, y: x.astype(np.float64) + y,
    )


@st.composite
def swiglus(draw):
    shape = draw(dims), draw(dims)

    def reference(gate, up):
        gate = gate.astype(np.float64)
        return gate / (1 + np.exp(-gate)) * up

    return Case(activations.swiglu, (spec(shape, FP32),) * 2, (numbers(*shape), numbers(*shape[::-1]).T), {}, reference)


@st.composite
def samples(draw):
    shape = draw(dims), draw(dims)

    def reference(logits):
        return [max(range(len(row)), key=row.__getitem__) for row in logits]

    return Case(ops.sample, (spec(shape, FP32),), (numbers(*shape),), {}, reference)


CASES = [embeds(), norms(), linears(), ropes(), attentions(), residuals(), swiglus(), samples()]
every_operation = pytest.mark.parametrize(
    "cases", CASES, ids=["embed", "rms_norm", "linear", "rope", "attention", "residual", "swiglu", "sample"]
)


# ---- properties of every operation


@every_operation
@given(data=st.data())
def test_rule_declares_the_flops_that_the_body_executes(cases, data):
    case = data.draw(cases)
    tally = Tally()
    watched = case.parts(tally.watch)
    assert flops(case.rule()[1]) == tally.flops
    for seen, out in zip(watched, case.parts(), strict=True):  # watched or not, it is the same computation
        np.testing.assert_allclose(values(seen), out, rtol=2e-5, atol=2e-6)


@every_operation
@given(data=st.data())
def test_body_computes_its_definition(cases, data):
    case = data.draw(cases)
    parts, expected = case.parts(), case.reference(*case.operands)
    for out, right in zip(parts, expected if len(parts) > 1 else [expected], strict=True):
        np.testing.assert_allclose(out, right, rtol=2e-5, atol=2e-6)


@every_operation
@given(data=st.data())
def test_operation_returns_the_shape_that_its_rule_promises_and_records_its_costs(cases, data):
    case = data.draw(cases)
    specs, costs = case.rule()
    with Ledger() as ledger:
        out = case.op(*map(Array, case.specs, case.operands), **case.static)
        abstract = case.op(*map(Array, case.specs), **case.static)
    assert [(entry.op, entry.counts) for entry in ledger.entries()] == [*costs, *costs]
    out, abstract, specs = (x if isinstance(x, list | tuple) else [x] for x in (out, abstract, specs))
    for one, other, promised in zip(out, abstract, specs, strict=True):
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


@every_operation
@given(data=st.data())
def test_every_intermediate_is_float32(cases, data):
    case = data.draw(cases)
    for out in case.parts(lambda x: x.view(Single)):
        assert out.dtype == (np.int64 if case.op is ops.sample else np.float32)


@every_operation
@given(data=st.data())
def test_operands_are_left_as_they_were(cases, data):
    case = data.draw(cases)

    def read_only(x):
        x.flags.writeable = False
        return x

    case.run(read_only)  # writing to an operand is an error


# ---- the parts of attention


@given(shape=st.tuples(dims, dims, dims, dims))
def test_softmax_executes_its_part_of_the_rule(shape):
    batch, n_heads, n_new, n_past = shape
    n_keys = n_past + n_new
    q, kv = spec((batch, n_heads, n_new, 2), FP32), spec((batch, n_heads, n_keys, 2), FP32, "kv")
    _, costs = attention.attention.rule(q, kv, kv, scale=0.5, window=None)
    tally = Tally()
    attention.softmax(tally.watch(numbers(batch, n_heads, n_new, n_keys)))
    assert (dict(costs)["softmax"].matmul_flops, dict(costs)["softmax"].elementwise_flops) == tally.flops


@contextmanager
def block_elements(n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_ELEMENTS", n)
        yield


@given(case=attentions(lengths=st.integers(1, 12)), n=st.integers(1, 200))
def test_blocks_of_queries_change_nothing(case, n):
    whole = case.run()
    with block_elements(n):
        blocked = case.run()
    np.testing.assert_allclose(blocked, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(blocked, case.reference(*case.operands), rtol=2e-5, atol=2e-6)


@given(case=attentions(lengths=st.integers(1, 8)), n=st.integers(1, 100))
def test_blocks_multiply_at_least_what_is_needed_and_at_most_the_rectangle(case, n):
    tally = Tally()
    with block_elements(n):
        case.run(tally.watch)
    rectangle = sum((counts for _, counts in case.rule()[1]), Counts())
    assert rectangle.needed_flops <= tally.matmul_flops <= rectangle.matmul_flops


@given(n_past=st.integers(0, 12), n_new=st.integers(1, 12), window=windows, heads=st.sampled_from([(1, 1), (4, 2)]))
@example(n_past=9, n_new=1, window=4, heads=(1, 1))
def test_masked_flops_are_those_of_the_pairs_that_no_query_sees(n_past, n_new, window, heads):
    n_heads, n_kv_heads = heads
    batch, head_dim = 2, 3
    held = list(range(n_past - n_retained(n_past, window), n_past + n_new))  # positions of the rows attended to
    hidden = sum(
        j > i or (window is not None and j <= i - window) for i in range(n_past, n_past + n_new) for j in held
    )
    kv = spec((batch, n_kv_heads, len(held), head_dim), FP32, "kv")
    _, costs = attention.attention.rule(spec((batch, n_heads, n_new, head_dim), FP32), kv, kv, scale=1.0, window=window)
    masked = {op: counts.masked_flops for op, counts in costs}
    per_product = 2 * batch * n_heads * head_dim * hidden
    assert masked == {"attn_scores": per_product, "softmax": 0, "attn_mix": per_product}


@given(chunks=st.lists(st.integers(1, 6), min_size=1, max_size=4), window=windows)
def test_needed_flops_do_not_depend_on_how_a_prompt_is_chunked(chunks, window):
    def needed(chunks):
        total, n_past = 0, 0
        for n_new in chunks:
            kv = spec((1, 1, n_retained(n_past, window) + n_new, 2), FP32, "kv")
            _, costs = attention.attention.rule(spec((1, 1, n_new, 2), FP32), kv, kv, scale=1.0, window=window)
            total += sum(counts.needed_flops for _, counts in costs)
            n_past += n_new
        return total

    assert needed(chunks) == needed([sum(chunks)])


# ---- attention: known answers


def attend(q, k, v, window=None):
    return attention.attention.__wrapped__(q, k, v, scale=q.shape[-1] ** -0.5, window=window)


@pytest.mark.parametrize("n_new", [1, 3])
@pytest.mark.parametrize("n_heads, n_kv_heads", [(4, 2), (6, 3)])
def test_neighbouring_query_heads_share_a_kv_head(n_heads, n_kv_heads, n_new):
    v = np.empty((1, n_kv_heads, 5, 2), np.float32)
    v[:] = np.arange(1, n_kv_heads + 1)[:, None, None]  # KV head i holds i + 1
    out = attend(numbers(1, n_heads, n_new, 2), numbers(*v.shape), v).reshape(n_new, n_heads, 2)
    np.testing.assert_allclose(out[..., 0], [np.repeat(np.arange(1, n_kv_heads + 1), 2)] * n_new, rtol=1e-6)  # 1 1 2 2


def test_a_window_of_4_shows_exactly_4_keys():
    identity = np.eye(10, dtype=np.float32)[None, None]  # as V: a query's output is its attention weights
    weights = attend(np.zeros_like(identity), identity, identity, window=4)
    assert np.flatnonzero(weights[9]).tolist() == [6, 7, 8, 9]
    assert np.flatnonzero(weights[3]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(weights[2]).tolist() == [0, 1, 2]
    np.testing.assert_allclose(weights[9, 6:], 0.25)


def test_a_window_of_4_shows_the_same_keys_through_the_cache():
    cache = KVCache(ModelConfig(1, 10, 1, 1, 1, head_dim=10, sliding_window=4), FP32)
    identity = np.eye(10, dtype=np.float32)[None, None]
    for position in range(10):
        row = Array(spec((1, 1, 1, 10), FP32), identity[:, :, position : position + 1])
        keys, v = ops.kv_append(cache, range(1), row, row)
    weights = attend(np.zeros((1, 1, 1, 10), np.float32), keys.data, v.data, window=4)
    assert np.flatnonzero(weights[0]).tolist() == [6, 7, 8, 9]


@given(n_past=st.integers(0, 8), n_new=st.integers(1, 5))
def test_causal_rows_see_one_key_more_each(n_past, n_new):
    n_keys = n_past + n_new
    v = np.eye(n_keys, dtype=np.float32)[None, None]
    weights = attend(np.zeros((1, 1, n_new, n_keys), np.float32), v, v)
    assert [np.count_nonzero(row) for row in weights] == list(range(n_past + 1, n_keys + 1))  # past 5, new 3: 6 7 8


@pytest.mark.parametrize("n_new", [1, 8])
def test_large_scores_stay_finite(n_new):
    q = k = np.full((1, 1, n_new, 64), 32.0, np.float16).astype(np.float32)  # q.k = 65536, beyond fp16
    out = attend(q, k, np.ones_like(k))
    np.testing.assert_allclose(out, 1, rtol=1e-6)  # V is 1: the row sums of the probabilities


@given(shape=st.tuples(dims, dims), size=st.sampled_from([1, 1e3, 1e30]))
def test_softmax_rows_sum_to_1(shape, size):
    rows = attention.softmax(numbers(*shape) * np.float32(size))
    assert np.all(rows >= 0)
    np.testing.assert_allclose(rows.sum(axis=-1), 1, rtol=1e-6)


# ---- rotary positions: known answers


def rope_table(head_dim):
    return RopeTable(SimpleNamespace(head_dim=head_dim, rope_theta=10000.0, rope_scaling=None), numeric=True)


def test_rope_turns_pairs_half_a_head_apart():
    q = np.array([1, 0, 0, 0], np.float32).reshape(1, 1, 1, 4)
    turned = ops.rope.__wrapped__(q, rope_table(4).rotation(1, 1).data)
    np.testing.assert_allclose(turned.ravel(), [np.cos(1), 0, np.sin(1), 0], rtol=1e-6)


def test_rope_tells_positions_apart_that_fp16_cannot():
    assert np.float16(2049) == 2048
    cos, sin = rope_table(64).rotation(2048, 2).data
    assert np.all((cos[0] != cos[1]) | (sin[0] != sin[1]))


def test_rope_table_is_exact_at_distant_positions():
    cos, sin = rope_table(64).rotation(15962, 1).data
    angles = 15962 * 10000.0 ** (-np.arange(32, dtype=np.float64) / 32)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[0], np.cos(angles), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin[0], np.sin(angles), rtol=0, atol=1e-7)


@given(starts=st.lists(st.integers(0, 700), min_size=1, max_size=4), n_new=dims)
def test_rope_table_is_the_same_however_it_grew(starts, n_new):
    grown = rope_table(4)
    for start in starts:
        np.testing.assert_array_equal(grown.rotation(start, n_new).data, rope_table(4).rotation(start, n_new).data)


@given(position=st.integers(0, 300), shift=st.integers(0, 300))
def test_rope_makes_scores_depend_on_distance_alone(position, shift):
    q, k = numbers(1, 1, 1, 8), numbers(1, 1, 8, 1).reshape(1, 1, 1, 8)
    table = rope_table(8)

    def score(q_position, k_position):
        turned = [ops.rope.__wrapped__(x, table.rotation(p, 1).data) for x, p in ((q, q_position), (k, k_position))]
        return np.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(position + shift, position), score(shift, 0), rtol=0, atol=5e-6)


# ---- bytes: the contract, row by row, from shapes and bits worked out here

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def n_scales(shape, format_):
    """fp16 scales: one for each row of int8, one for each 128 (or rest) of a row of int4."""
    per_row = {"int8": 1, "int4": len(range(0, shape[-1], 128))}.get(str(format_), 0)
    return per_row * sum(1 for _ in np.ndindex(*shape[:-1]))


def stored(shape, format_):
    n_bits = int(np.prod(shape)) * BITS[format_]
    return (n_bits + 7) // 8 + 2 * n_scales(shape, format_)


@given(shape=st.tuples(dims, row_lengths), format_=weight_formats)
@example(shape=(3, 5), format_=FORMATS["int4"])  # 15 elements: 8 bytes, 3 scales: 6
@example(shape=(2, 300), format_=FORMATS["int4"])  # 600 elements: 300 bytes, 2 * 3 scales: 12
def test_stored_bytes(shape, format_):
    assert format_.nbytes(shape) == spec(shape, format_, "weight").nbytes == stored(shape, format_)


@pytest.mark.parametrize(
    "name, nbytes", [("fp32", 60), ("fp16", 30), ("bf16", 30), ("fp8", 15), ("int8", 15 + 6), ("int4", 8 + 6)]
)
def test_stored_bytes_of_a_3_by_5_matrix(name, nbytes):
    assert FORMATS[name].nbytes((3, 5)) == nbytes


@given(shape=st.tuples(dims, row_lengths), bits=st.decimals("0.01", 64, places=2))
@example(shape=(1, 300), bits="4.83")  # 1449 bits
def test_bits_per_weight_round_up_to_whole_bytes(shape, bits):
    exact = shape[0] * shape[1] * Fraction(str(bits)) / 8
    assert 0 <= mixed_format(bits).nbytes(shape) - exact < 1
    assert mixed_format(bits).scales(shape) == 0


@given(shape=st.tuples(dims, dims), tokens=st.tuples(dims, dims), w=weight_formats, a=activation_formats)
def test_embed_reads_a_row_for_each_token(shape, tokens, w, a):
    (_, d), n = shape, tokens[0] * tokens[1]
    out, costs = ops.embed.rule(spec(tokens, a, "token"), spec(shape, w, "weight", "embed"))
    assert costs == (
        (
            "embed",
            Counts(
                elementwise_flops=n * d if w in ("int8", "int4") else 0,
                weight_bytes_read=stored((n, d), w),
                activation_bytes_written=stored((n, d), a),
            ),
        ),
    )
    assert (out.shape, out.format, out.role) == ((n, d), a, "activation")


@given(n=dims, d=dims, w=weight_formats, a=activation_formats)
def test_rms_norm_reads_its_gain_at_16_bits_or_more(n, d, w, a):
    vectors = Precision(weights=w).vectors
    assert vectors == (w if BITS[w] >= 16 else "fp16")
    _, costs = ops.rms_norm.rule(spec((n, d), a), spec((d,), vectors, "weight", "mlp_norm"), eps=EPS)
    moved = stored((n, d), a)
    assert costs == (("mlp_norm", Counts(0, 0, n * (4 * d + 2), stored((d,), vectors), 0, 0, moved, moved)),)


@given(
    n=dims,
    d_in=row_lengths,
    d_outs=st.lists(dims, min_size=1, max_size=3),
    bias=st.booleans(),
    w=weight_formats,
    a=activation_formats,
)
def test_linear_counts_each_of_its_projections(n, d_in, d_outs, bias, w, a):
    names = ["q_proj", "k_proj", "v_proj"][: len(d_outs)]
    vectors = FORMATS["fp16"] if BITS[w] < 16 else w
    parts = tuple(
        (spec((d_out, d_in), w, "weight", name), spec((d_out,), vectors, "weight", name) if bias else None)
        for d_out, name in zip(d_outs, names)
    )
    _, costs = ops.linear.rule(spec((n, d_in), a), parts)
    widening = {"int8": lambda d_out: n * d_out, "int4": lambda d_out: d_in * d_out}.get(str(w), lambda d_out: 0)
    assert costs == tuple(
        (
            name,
            Counts(
                matmul_flops=2 * n * d_in * d_out,
                elementwise_flops=widening(d_out) + (n * d_out if bias else 0),
                weight_bytes_read=stored((d_out, d_in), w) + (stored((d_out,), vectors) if bias else 0),
                activation_bytes_read=stored((n, d_in), a),
                activation_bytes_written=stored((n, d_out), a),
            ),
        )
        for d_out, name in zip(d_outs, names)
    )


@given(n=dims, d_in=row_lengths, d_out=dims, bits=st.decimals("0.01", 64, places=2))
def test_mixed_formats_widen_nothing(n, d_in, d_out, bits):
    matrix = spec((d_out, d_in), Precision(bits_per_weight=bits).matrices, "weight", "o_proj")
    _, ((_, counts),) = ops.linear.rule(spec((n, d_in), FP32), ((matrix, None),))
    assert counts.elementwise_flops == 0
    assert counts.weight_bytes_read == -(-d_out * d_in * Fraction(str(bits)) // 8)


@given(shape=st.tuples(dims, dims, dims, st.integers(2, 6)), a=activation_formats)
def test_rope_reads_and_writes_what_it_turns(shape, a):
    batch, n_heads, n_new, head_dim = shape
    half = head_dim // 2
    _, costs = ops.rope.rule(spec(shape, a), spec((2, n_new, half), None, "constant"))
    moved = stored(shape, a)
    turned = batch * n_heads * n_new * 2 * half
    assert costs == (("rope", Counts(0, 0, 3 * turned, activation_bytes_read=moved, activation_bytes_written=moved)),)


@given(
    sizes=st.tuples(dims, dims, dims, dims, dims),
    n_past=st.integers(0, 6),
    c=kv_formats,
    a=activation_formats,
)
def test_attention_moves_scores_in_its_parts_and_shares_the_read_of_kv(sizes, n_past, c, a):
    batch, n_kv_heads, group, n_new, head_dim = sizes
    n_heads, n_keys = n_kv_heads * group, n_past + n_new
    kv = spec((batch, n_kv_heads, n_keys, head_dim), c, "kv")
    out, costs = attention.attention.rule(spec((batch, n_heads, n_new, head_dim), a), kv, kv, scale=1.0, window=None)
    pairs = batch * n_heads * n_new * n_keys
    moved = batch * n_new * n_heads * head_dim * BITS[a] // 8
    score = pairs * BITS[a] // 8
    keys = batch * n_keys * n_kv_heads * (head_dim * BITS[c] // 8 + (2 if c == "int8" else 0))
    scales = pairs if c == "int8" else 0
    later = batch * n_heads * (n_new * (n_new - 1) // 2)  # pairs with a key after the query
    product = Counts(matmul_flops=2 * pairs * head_dim, masked_flops=2 * later * head_dim, kv_bytes_read=keys)
    assert dict(costs) == {
        "attn_scores": product._replace(
            elementwise_flops=pairs + scales, activation_bytes_read=moved, score_bytes_written=score
        ),
        "softmax": Counts(
            elementwise_flops=batch * n_heads * n_new * (5 * n_keys - 2),
            score_bytes_read=score,
            score_bytes_written=score,
        ),
        "attn_mix": product._replace(
            elementwise_flops=scales, score_bytes_read=score, activation_bytes_written=moved
        ),
    }
    assert (out.shape, out.format) == ((batch * n_new, n_heads * head_dim), a)


@given(shape=st.tuples(dims, dims), a=activation_formats)
def test_residual_activation_and_sample_bytes(shape, a):
    x, moved, n = spec(shape, a), stored(shape, a), shape[0] * shape[1]
    two_in_one_out = Counts(activation_bytes_read=2 * moved, activation_bytes_written=moved)
    rules = [ops.residual.rule(x, x, op="mlp_residual"), activations.swiglu.rule(x, x), ops.sample.rule(x)]
    assert [costs for _, costs in rules] == [
        (("mlp_residual", two_in_one_out._replace(elementwise_flops=n)),),
        (("mlp_act", two_in_one_out._replace(elementwise_flops=4 * n)),),
        (("sample", Counts(elementwise_flops=shape[0] * (shape[1] - 1), activation_bytes_read=moved)),),
    ]


# ---- kv_append


@given(
    batch=dims,
    n_kv_heads=dims,
    half=st.integers(1, 3),
    chunks=st.lists(dims, min_size=1, max_size=4),
    window=windows,
    c=kv_formats,
    a=activation_formats,
)
def test_kv_append_counts_new_rows_and_shows_those_still_seen(batch, n_kv_heads, half, chunks, window, c, a):
    head_dim = 2 * half
    config = ModelConfig(3, 4, n_kv_heads, 1, 1, head_dim=head_dim, sliding_window=window)
    cache, n_past = KVCache(config, c, batch, numeric=False), 0
    for n_new in chunks:
        new = Array(spec((batch, n_kv_heads, n_new, head_dim), a))
        with Ledger() as ledger:
            visible = ops.kv_append(cache, range(3), new, new)
        rows = batch * n_new * n_kv_heads
        assert [(entry.op, entry.counts) for entry in ledger.entries()] == [
            (
                "kv_append",
                Counts(
                    kv_bytes_written=rows * 2 * (head_dim * BITS[c] // 8 + (2 if c == "int8" else 0)),
                    activation_bytes_read=rows * 2 * head_dim * BITS[a] // 8,
                ),
            )
        ]
        assert {x.shape for x in visible} == {(batch, n_kv_heads, n_retained(n_past, window) + n_new, head_dim)}
        assert {(x.spec.format, x.spec.role) for x in visible} == {(c, "kv")}
        n_past += n_new


@given(chunks=st.lists(dims, min_size=1, max_size=4), window=windows, c=st.sampled_from(["fp32", "fp16", "bf16"]))
def test_kv_append_gives_back_the_rows_rounded_to_the_format(chunks, window, c):
    config = ModelConfig(1, 4, 2, 1, 1, head_dim=2, sliding_window=window)
    cache = KVCache(config, FORMATS[c])
    k, v = numbers(1, 2, sum(chunks), 2), numbers(2, 1, 2, sum(chunks)).transpose(1, 0, 3, 2)
    largest_error = {"fp32": 0, "fp16": 2**-11, "bf16": 2**-8}[c]  # half a unit in the last place, relative
    stop = 0
    for n_new in chunks:
        start, stop = stop, stop + n_new
        new = [Array(spec((1, 2, n_new, 2), FP32), x[:, :, start:stop]) for x in (k, v)]
        for seen, given_ in zip(ops.kv_append(cache, range(1), *new), (k, v)):
            assert seen.data.dtype == np.float32
            assert seen.data.shape == seen.shape
            expected = given_[:, :, start - n_retained(start, window) : stop]
            np.testing.assert_allclose(seen.data, expected, rtol=largest_error, atol=1e-6 * largest_error)


# ---- formats that are counted and not run: what they would execute, written out and watched


@given(n=dims, d_in=st.sampled_from([1, 5, 129]), d_out=dims)
def test_int4_scales_multiply_the_weights(n, d_in, d_out):
    tally = Tally()
    x, codes, scales = (tally.watch(numbers(*shape)) for shape in ((n, d_in), (d_out, d_in), (d_out, -(-d_in // 128))))
    x @ (codes * np.repeat(scales, 128, axis=1)[:, :d_in]).T
    matrix = spec((d_out, d_in), FORMATS["int4"], "weight", "up_proj")
    assert flops(ops.linear.rule(spec((n, d_in), FP32), ((matrix, None),))[1]) == tally.flops


# ---- operands that do not fit


def weight(*shape, name):
    return spec(shape, FP32, "weight", name)


def heads(*shape, role="activation"):
    return spec(shape, FP32, role)


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            lambda: ops.rms_norm.rule(spec((2, 3), FP32), weight(4, name="attn_norm"), eps=EPS),
            "attn_norm: x has rows of 3 but the gain is (4,)",
        ),
        (
            lambda: ops.linear.rule(spec((2, 3), FP32), ((weight(5, 4, name="q_proj"), None),)),
            "q_proj: x has d_in=3 but w has d_in=4 (x (2, 3), w (5, 4))",
        ),
        (
            lambda: ops.residual.rule(spec((2, 3), FP32), spec((3, 2), FP32), op="mlp_residual"),
            "mlp_residual: (2, 3) and (3, 2) differ",
        ),
    ],
    ids=["rms_norm", "linear", "residual"],
)
def test_shapes_that_do_not_fit_are_named(rule, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        rule()


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((1, 3, 1, 4), (1, 2, 5, 4), (1, 2, 5, 4)),  # 3 heads cannot share 2
        ((1, 4, 1, 6), (1, 2, 5, 4), (1, 2, 5, 4)),  # heads of another width
        ((1, 4, 1, 4), (1, 2, 5, 4), (1, 2, 4, 4)),  # a value is missing
    ],
)
def test_attention_refuses_heads_that_do_not_fit(q, k, v):
    with pytest.raises(ShapeError, match=re.escape(f"attention: q {q}, k {k} and v {v} do not fit each other")):
        attention.attention.rule(heads(*q), heads(*k, role="kv"), heads(*v, role="kv"), scale=1.0, window=None)


@pytest.mark.parametrize("numeric", [True, False])
def test_kv_append_refuses_heads_of_another_shape(numeric):
    cache = KVCache(ModelConfig(1, 4, 2, 1, 1, head_dim=2), FP32, numeric=numeric)
    k, v = (Array(heads(*shape), numbers(*shape) if numeric else None) for shape in ((1, 2, 3, 2), (1, 2, 3, 4)))
    with pytest.raises(ShapeError, match=re.escape("k is (1, 2, 3, 2) and v is (1, 2, 3, 4), expected (1, 2, 3, 2)")):
        ops.kv_append(cache, range(1), k, v)
    assert cache.length == 0
