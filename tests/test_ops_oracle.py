"""Every operation of npinfer.ops and npinfer.activations against independent answers.

What it computes and what its rule declares (`oracle`); then known answers, and
the bytes its rule declares against sizes worked out here from shapes and bits.
"""

import math
import re
import threading
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import npinfer.operation
from npinfer import activations, ops, products
from npinfer.config import ModelConfig
from npinfer.errors import ShapeError
from npinfer.formats import ALLOWED, FORMATS, Precision, mixed_format
from npinfer.kvcache import KVCache
from npinfer.ledger import Counts, Ledger
from npinfer.parts import Latent
from npinfer.rope import RopeTable
from npinfer.specs import Array, spec
from oracle import (
    BITS, CHECKS, FP32, Case, a_matrix, dims, flops, listed, matrix_formats, multiplied, n_retained, numbers, stored, unscaled,
    vectors_of, windows,
)  # fmt: skip
from reference import ACTS
from tally import Tally

EPS = 1e-5

row_lengths = dims | st.sampled_from([127, 128, 129, 256, 300])  # around int4's groups of 128
weight_formats, kv_formats, activation_formats = (
    st.sampled_from([FORMATS[name] for name in ALLOWED[field]]) for field in ("weights", "kv", "activations")
)


# ---- cases


@st.composite
def embeds(draw):
    batch, n_new, d, vocab = draw(dims), draw(dims), draw(dims), draw(dims)
    format_, scale, positions = draw(matrix_formats), draw(st.none() | st.just(3**0.5)), draw(st.booleans())
    tokens = np.arange(batch * n_new).reshape(batch, n_new) * 7 % vocab
    ((table, _),), values = a_matrix(["embed"], [vocab], d, format_)

    def reference(tokens, matrix, learned):
        rows = [[unscaled(matrix, t, i) * (scale or 1) for i in range(d)] for t in tokens.ravel()]
        return rows if learned is None else [row + learned[n % n_new] for n, row in enumerate(np.array(rows))]

    return Case(
        ops.embed,
        (spec((batch, n_new), FP32, "token"), table, spec((n_new, d), FP32, "weight", "positions") if positions else None),
        (tokens, values, numbers(n_new, d) if positions else None),
        {"scale": scale},
        reference,
    )


@st.composite
def rms_norms(draw):
    n, d = draw(dims), draw(dims)

    def reference(gain, x):
        x = x.astype(np.float64)
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * gain

    specs = spec((d,), FP32, "weight", "attn_norm"), spec((n, d), FP32)
    return Case(ops.rms_norm, specs, (numbers(d), numbers(n, d)), {"eps": EPS}, reference)


@st.composite
def layer_norms(draw):
    n, d = draw(dims), draw(dims)

    def reference(gain, bias, x):
        out = []
        for row in x.astype(np.float64):
            mean = math.fsum(row) / d
            variance = math.fsum([(value - mean) ** 2 for value in row]) / d
            out.append([(value - mean) / math.sqrt(variance + EPS) * g + b for value, g, b in zip(row, gain, bias)])
        return out

    vector = spec((d,), FP32, "weight", "mlp_norm")
    operands = numbers(d), numbers(d, seed=1), numbers(n, d)
    return Case(ops.layer_norm, (vector, vector, spec((n, d), FP32)), operands, {"eps": EPS}, reference)


@st.composite
def linears(draw, op=products.linear):
    n, d_in = draw(dims), draw(dims)
    capped = op is products.capped_linear
    d_outs = draw(st.lists(dims, min_size=1, max_size=1 if capped else 3))
    static = {"softcap": draw(st.sampled_from([0.5, 30.0]))} if capped else {}
    pairs, w = a_matrix(["q_proj", "k_proj", "v_proj"], d_outs, d_in, draw(matrix_formats), draw(st.booleans()))

    def reference(x, w):
        out = multiplied(x, w)
        if capped:
            out = np.array([[static["softcap"] * math.tanh(value / static["softcap"]) for value in row] for row in out])
        parts = np.split(out, np.cumsum(d_outs)[:-1], axis=1)
        return parts if len(parts) > 1 and op is products.linear else out

    return Case(op, (spec((n, d_in), FP32), pairs), (numbers(n, d_in), w), static, reference)


@st.composite
def ropes(draw):
    """Queries, or queries and keys, or values behind them, of a model with rotary positions and of one without."""
    batch, n_new, half = draw(dims), draw(dims), draw(st.integers(0, 3))
    before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    turned = draw(st.lists(dims, min_size=1, max_size=2).map(tuple))
    others = draw(st.just(()) | st.tuples(dims))
    head_dim = before + 2 * half + behind or 1
    n_heads = sum(turned + others)
    angles = numbers(n_new, half).astype(np.float64)

    def reference(rows, rotation):
        x = rows.reshape(batch, n_new, n_heads, head_dim)
        first, second = x[..., before : before + half], x[..., before + half : before + 2 * half]
        pairs = (first + 1j * second) * np.exp(1j * angles)[:, None]  # a pair is a complex number
        out = np.concatenate([x[..., :before], pairs.real, pairs.imag, x[..., before + 2 * half :]], axis=-1)
        out[:, :, sum(turned) :] = x[:, :, sum(turned) :]
        parts = np.split(out.transpose(0, 2, 1, 3), np.cumsum(turned + others)[:-1], axis=1)
        return parts if len(parts) > 1 else parts[0]

    specs = spec((batch * n_new, n_heads * head_dim), FP32), spec((2, n_new, 1, 2, half), None, "constant")
    static = {"head_dim": head_dim, "turned": turned, "others": others, "n_kept": before}
    return Case(ops.rope, specs, (numbers(*specs[0].shape), rotation_of(angles)), static, reference)


def rotation_of(angles):
    """Cosines and sines of angles (n_new, half), as `npinfer.rope` lays them out."""
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return np.stack([np.stack([cos, cos], 1)[:, None], np.stack([-sin, sin], 1)[:, None]])


@st.composite
def residuals(draw, op):
    shape = draw(dims), draw(dims)
    return Case(
        op,
        (spec(shape, FP32), spec(shape, FP32)),
        (numbers(*shape), numbers(*shape[::-1]).T),
        {},
        lambda x, y: x.astype(np.float64) + y,
    )


def acts(name, gated=True, **static):
    """Cases of an activation, defined by what it makes of one element (or of a gate and an up)."""
    op, definition = getattr(activations, name), ACTS[name]

    @st.composite
    def cases(draw):
        shape = draw(dims), draw(dims)
        operands = (numbers(*shape) * np.float32(3), numbers(*shape[::-1]).T * np.float32(3))[: 1 + gated]
        reference = np.vectorize(definition, otypes=[float])
        return Case(op, (spec(shape, FP32),) * len(operands), operands, static, lambda *x: reference(*x, **static))

    return cases()


@st.composite
def samples(draw):
    shape = draw(dims), draw(dims)

    def reference(logits):
        return [max(range(len(row)), key=row.__getitem__) for row in logits]

    return Case(ops.sample, (spec(shape, FP32),), (numbers(*shape),), {}, reference)


CASES = {
    "embed": embeds(),
    "rms_norm": rms_norms(),
    "layer_norm": layer_norms(),
    "linear": linears(),
    "linear_side_by_side": linears(products.linear_side_by_side),
    "capped_linear": linears(products.capped_linear),
    "rope": ropes(),
    "attn_residual": residuals(ops.attn_residual),
    "mlp_residual": residuals(ops.mlp_residual),
    "swiglu": acts("swiglu"),
    "geglu": acts("geglu"),
    "gelu": acts("gelu", gated=False),
    "clamped_swiglu": acts("clamped_swiglu", limit=2.5, alpha=1.702),
    "sample": samples(),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@given(data=st.data())
def test_every_operation(cases, check, data):
    check(data.draw(cases))


@pytest.mark.parametrize("name, gate, up, right", [
    ("swiglu", 1.0, 2.0, 1.4621172),  # 1 / (1 + e^-1) = 0.7310586, times 2
    ("geglu", 1.0, 2.0, 1.6823840),  # 2 * 0.5 * (1 + tanh(0.7978846 * 1.044715)) = 1 + tanh(0.8335620)
    ("clamped_swiglu", 9.0, -9.0, -41.9997207),  # 7 / (1 + e^(-1.702 * 7)) * (-7 + 1), e^-11.914 = 6.69e-6
])
def test_activations_done_by_hand(name, gate, up, right):
    static = {"limit": 7.0, "alpha": 1.702} if name == "clamped_swiglu" else {}
    out = getattr(activations, name).__wrapped__(*[np.full((1, 1), x, np.float32) for x in (gate, up)], **static)
    np.testing.assert_allclose(out, right, rtol=1e-6)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "gelu", "clamped_swiglu"])
def test_activations_of_large_values_have_their_limits(name):
    """exp and tanh leave their range without a warning: 0 on the left, the gate itself on the right."""
    static = {"limit": 1e4, "alpha": 1.0} if name == "clamped_swiglu" else {}
    gate = np.array([[-1e4, 1e4]], np.float32)
    up = np.full((1, 2), 0 if name == "clamped_swiglu" else 1, np.float32)  # the clamped one adds 1
    with np.errstate(over="ignore"):  # as in a forward
        out = getattr(activations, name).__wrapped__(*((gate,) if name == "gelu" else (gate, up)), **static)
    np.testing.assert_allclose(out, [[0, 1e4]])


def test_a_softcap_is_never_exceeded_and_leaves_small_values_alone():
    w = a_matrix(["lm_head"], [3], 1)[1]._replace(rows=np.array([[1e-3], [30.0], [1e6]], np.float32))
    out = products.capped_linear.__wrapped__(np.ones((1, 1), np.float32), w, softcap=30.0)
    np.testing.assert_allclose(out, [[1e-3, 30 * 0.76159416, 30]], rtol=1e-6)  # tanh 1 = 0.76159416


# ---- rotary positions: known answers


def rope_table(head_dim):
    config = SimpleNamespace(rope_dim=head_dim, rope_theta=10000.0, rope_scaling=None, local_rope_theta=None)
    return RopeTable(config, numeric=True)


def turn(row, rotation):
    """One head rotated: (N, head_dim) -> (B, 1, T, head_dim)."""
    return ops.rope.__wrapped__(row, rotation, head_dim=row.shape[1], turned=(1,))


def test_rope_turns_pairs_half_a_head_apart():
    q = np.array([[1, 0, 0, 0]], np.float32)
    turned = turn(q, rope_table(4).rotation(1, 1).data)
    np.testing.assert_allclose(turned.ravel(), [np.cos(1), 0, np.sin(1), 0], rtol=1e-6)


def test_rope_tells_positions_apart_that_fp16_cannot():
    assert np.float16(2049) == 2048
    cos, sin = rope_table(64).rotation(2048, 2).data
    assert np.all((cos[0] != cos[1]) | (sin[0] != sin[1]))


def test_rope_table_is_exact_at_distant_positions():
    cos, sin = rope_table(64).rotation(15962, 1).data
    angles = 15962 * 10000.0 ** (-np.arange(32, dtype=np.float64) / 32)
    assert cos.dtype == sin.dtype == np.float32
    for cosines, sines in ((cos[0, 0, 0], -sin[0, 0, 0]), (cos[0, 0, 1], sin[0, 0, 1])):  # of first and second elements
        np.testing.assert_allclose(cosines, np.cos(angles), rtol=0, atol=1e-7)
        np.testing.assert_allclose(sines, np.sin(angles), rtol=0, atol=1e-7)


@given(starts=st.lists(st.integers(0, 700), min_size=1, max_size=4), n_new=dims)
def test_rope_table_is_the_same_however_it_grew(starts, n_new):
    grown = rope_table(4)
    for start in starts:
        np.testing.assert_array_equal(grown.rotation(start, n_new).data, rope_table(4).rotation(start, n_new).data)


@given(position=st.integers(0, 300), shift=st.integers(0, 300))
def test_rope_makes_scores_depend_on_distance_alone(position, shift):
    q, k = numbers(1, 8), numbers(8, 1).reshape(1, 8)
    table = rope_table(8)

    def score(q_position, k_position):
        turned = [turn(x, table.rotation(p, 1).data) for x, p in ((q, q_position), (k, k_position))]
        return np.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(position + shift, position), score(shift, 0), rtol=0, atol=5e-6)


# ---- bytes: the contract, row by row, from shapes and bits worked out here

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


@given(
    shape=st.tuples(dims, dims),
    tokens=st.tuples(dims, dims),
    w=weight_formats,
    a=activation_formats,
    scale=st.none() | st.just(2.0),
    positions=st.booleans(),
)
def test_embed_reads_a_row_for_each_token_and_one_for_each_position(shape, tokens, w, a, scale, positions):
    (_, d), (batch, n_new) = shape, tokens
    n, vectors = batch * n_new, vectors_of(w)
    learned = spec((n_new, d), vectors, "weight", "positions") if positions else None
    out, costs = ops.embed.rule(spec(tokens, a, "token"), spec(shape, w, "weight", "embed"), learned, scale=scale)
    assert costs == (
        (
            "embed",
            Counts(
                elementwise_flops=n * d * ((w in ("int8", "int4")) + (scale is not None) + positions),
                weight_bytes_read=stored((n, d), w) + (stored((n_new, d), vectors) if positions else 0),
                activation_bytes_written=stored((n, d), a),
            ),
        ),
    )
    assert (out.shape, out.format, out.role) == ((n, d), a, "activation")


@given(n=dims, d=dims, w=weight_formats, a=activation_formats)
def test_rms_norm_reads_its_gain_at_16_bits_or_more(n, d, w, a):
    vectors = Precision(weights=w).vectors
    assert vectors == vectors_of(w)
    _, costs = ops.rms_norm.rule(spec((d,), vectors, "weight", "mlp_norm"), spec((n, d), a), eps=EPS)
    moved = stored((n, d), a)
    assert costs == (("mlp_norm", Counts(0, 0, n * (4 * d + 2), stored((d,), vectors), 0, 0, moved, moved)),)


@given(n=dims, d=dims, w=weight_formats, a=activation_formats)
def test_layer_norm_reads_a_gain_and_a_bias(n, d, w, a):
    vector, moved = spec((d,), Precision(weights=w).vectors, "weight", "post_mlp_norm"), stored((n, d), a)
    _, costs = ops.layer_norm.rule(vector, vector, spec((n, d), a), eps=EPS)
    gain_and_bias = 2 * stored((d,), vectors_of(w))
    assert costs == (("post_mlp_norm", Counts(0, 0, n * (7 * d + 2), gain_and_bias, 0, 0, moved, moved)),)


@given(
    n=dims,
    d_in=row_lengths,
    d_outs=st.lists(dims, min_size=1, max_size=3),
    bias=st.booleans(),
    softcap=st.none() | st.just(30.0),
    w=weight_formats,
    a=activation_formats,
)
def test_linear_counts_each_of_its_projections(n, d_in, d_outs, bias, softcap, w, a):
    names = ["q_proj", "k_proj", "v_proj"][: len(d_outs)]
    vectors, capping = vectors_of(w), 3 if softcap else 0
    parts = tuple(
        (spec((d_out, d_in), w, "weight", name), spec((d_out,), vectors, "weight", name) if bias else None)
        for d_out, name in zip(d_outs, names)
    )
    outs, costs = products.linear.rule(spec((n, d_in), a), parts) if softcap is None else products.capped_linear.rule(
        spec((n, d_in), a), parts, softcap=softcap
    )
    assert [out.shape for out in listed(outs)] == [(n, d_out) for d_out in d_outs]
    if softcap is None:
        together, same = products.linear_side_by_side.rule(spec((n, d_in), a), parts)
        assert (together.shape, same) == ((n, sum(d_outs)), costs)
    widening = {"int8": lambda d_out: n * d_out, "int4": lambda d_out: d_in * d_out}.get(str(w), lambda d_out: 0)
    assert costs == tuple(
        (
            name,
            Counts(
                matmul_flops=2 * n * d_in * d_out,
                elementwise_flops=widening(d_out) + n * d_out * (bias + capping),
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
    _, ((_, counts),) = products.linear.rule(spec((n, d_in), FP32), ((matrix, None),))
    assert counts.elementwise_flops == 0
    assert counts.weight_bytes_read == -(-d_out * d_in * Fraction(str(bits)) // 8)


@given(
    shape=st.tuples(dims, dims, st.integers(0, 4)), turned=st.lists(dims, min_size=1, max_size=2).map(tuple),
    others=st.just(()) | st.tuples(dims), n_kept=st.integers(0, 3), behind=st.integers(0, 3), a=activation_formats,
)  # fmt: skip
def test_rope_reads_and_writes_all_but_what_has_no_position(shape, turned, others, n_kept, behind, a):
    """A partial rotary copies what it does not turn; the part of a latent's head that has no position is not its business."""
    batch, n_new, half = shape
    head_dim = n_kept + 2 * half + behind or 1
    rows = spec((batch * n_new, sum(turned + others) * head_dim), a)
    rotation = spec((2, n_new, 1, 2, half), None, "constant")
    outs, costs = ops.rope.rule(rows, rotation, head_dim=head_dim, turned=turned, others=others, n_kept=n_kept)
    assert [out.shape for out in listed(outs)] == [(batch, n_heads, n_new, head_dim) for n_heads in turned + others]
    assert {(out.format, out.role) for out in listed(outs)} == {(a, "activation")}
    expected = []
    for n_heads in turned if half else ():  # values are only looked at
        moved = stored((batch, n_heads, n_new, 2 * half + behind), a)
        flops = 3 * batch * n_heads * n_new * 2 * half
        expected.append(("rope", Counts(0, 0, flops, activation_bytes_read=moved, activation_bytes_written=moved)))
    assert costs == tuple(expected)


@given(shape=st.tuples(dims, dims), a=activation_formats)
def test_residual_activation_and_sample_bytes(shape, a):
    x, moved, n = spec(shape, a), stored(shape, a), shape[0] * shape[1]
    two_in_one_out = Counts(activation_bytes_read=2 * moved, activation_bytes_written=moved)
    rules = [ops.attn_residual.rule(x, x), ops.mlp_residual.rule(x, x), activations.gelu.rule(x), ops.sample.rule(x)]
    rules += [act.rule(x, x) for act in (activations.swiglu, activations.geglu)]
    rules.append(activations.clamped_swiglu.rule(x, x, limit=7.0, alpha=1.7))
    assert [costs for _, costs in rules] == [
        (("attn_residual", two_in_one_out._replace(elementwise_flops=n)),),
        (("mlp_residual", two_in_one_out._replace(elementwise_flops=n)),),
        (("mlp_act", two_in_one_out._replace(elementwise_flops=9 * n, activation_bytes_read=moved)),),
        (("sample", Counts(elementwise_flops=shape[0] * (shape[1] - 1), activation_bytes_read=moved)),),
        *[(("mlp_act", two_in_one_out._replace(elementwise_flops=per_element * n)),) for per_element in (4, 10, 9)],
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


@given(
    batch=dims,
    kv_rank=dims,
    half=st.integers(1, 3),
    chunks=st.lists(dims, min_size=1, max_size=3),
    window=windows,
    c=kv_formats,
    a=activation_formats,
)
def test_kv_append_writes_one_latent_row_for_each_token(batch, kv_rank, half, chunks, window, c, a):
    latent = Latent(kv_rank=kv_rank, rope_dim=2 * half, value_dim=3)
    config = ModelConfig(2, 4, 2, 1, 1, head_dim=2 * half + 1, latent=latent, sliding_window=window)
    cache, n_past, width = KVCache(config, c, batch, numeric=False), 0, kv_rank + 2 * half
    for n_new in chunks:
        with Ledger() as ledger:
            pieces = [Array(spec((batch, 1, n_new, part), a)) for part in (kv_rank, 2 * half)]
            (visible,) = ops.kv_append(cache, range(2), *pieces)
        rows = batch * n_new
        assert [entry.counts for entry in ledger.entries()] == [
            Counts(
                kv_bytes_written=rows * (width * BITS[c] // 8 + (2 if c == "int8" else 0)),
                activation_bytes_read=rows * width * BITS[a] // 8,
            )
        ]
        assert (visible.shape, visible.spec.format) == ((batch, 1, n_retained(n_past, window) + n_new, width), c)
        n_past += n_new


# ---- a format written out and watched


@given(n=dims, d_in=st.sampled_from([1, 5, 129]), d_out=dims)
def test_int4_scales_multiply_the_weights(n, d_in, d_out):
    tally = Tally()
    x, codes, scales = (tally.watch(numbers(*shape)) for shape in ((n, d_in), (d_out, d_in), (d_out, -(-d_in // 128))))
    x @ (codes * np.repeat(scales, 128, axis=1)[:, :d_in]).T
    matrix = spec((d_out, d_in), FORMATS["int4"], "weight", "up_proj")
    assert flops(products.linear.rule(spec((n, d_in), FP32), ((matrix, None),))[1]) == tally.flops


# ---- operands that do not fit


def weight(*shape, name):
    return spec(shape, FP32, "weight", name)


def heads(*shape, role="activation"):
    return spec(shape, FP32, role)


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            lambda: ops.rms_norm.rule(weight(4, name="attn_norm"), spec((2, 3), FP32), eps=EPS),
            "attn_norm: x has rows of 3 but the gain is (4,)",
        ),
        (
            lambda: products.linear.rule(spec((2, 3), FP32), ((weight(5, 4, name="q_proj"), None),)),
            "q_proj: x has d_in=3 but w has d_in=4 (x (2, 3), w (5, 4))",
        ),
        (
            lambda: ops.mlp_residual.rule(spec((2, 3), FP32), spec((3, 2), FP32)),
            "mlp_residual: (2, 3) and (3, 2) differ",
        ),
        (
            lambda: ops.layer_norm.rule(weight(3, name="attn_norm"), weight(4, name="attn_norm"), spec((2, 3), FP32), eps=EPS),
            "attn_norm: x has rows of 3 but the gain is (3,) and the bias (4,)",
        ),
        (
            lambda: ops.rope.rule(
                spec((3, 12), FP32), spec((2, 3, 1, 2, 3), None, "constant"), head_dim=6, turned=(2,), n_kept=2
            ),
            "rope: rows are (3, 12) but the rotation is (2, 3, 1, 2, 3), expected a multiple of 3 rows of 2 heads of 6, "
            "and up to 2 pairs",
        ),
        (
            lambda: activations.geglu.rule(spec((2, 3), FP32), spec((2, 4), FP32)),
            "mlp_act: gate (2, 3) and up (2, 4) differ",
        ),
    ],
    ids=["rms_norm", "linear", "residual", "layer_norm", "rope", "geglu"],
)
def test_shapes_that_do_not_fit_are_named(rule, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        rule()


@pytest.mark.parametrize("numeric", [True, False])
def test_kv_append_refuses_heads_of_another_shape(numeric):
    cache = KVCache(ModelConfig(1, 4, 2, 1, 1, head_dim=2), FP32, numeric=numeric)
    k, v = (Array(heads(*shape), numbers(*shape) if numeric else None) for shape in ((1, 2, 3, 2), (1, 2, 3, 4)))
    with pytest.raises(ShapeError, match=re.escape("k is (1, 2, 3, 2) and v is (1, 2, 3, 4), expected (1, 2, 3, 2)")):
        ops.kv_append(cache, range(1), k, v)
    assert cache.length == 0


# ---- the memo of an operation


def test_what_an_operation_remembers_is_bounded_whatever_threads_do(monkeypatch):
    monkeypatch.setattr(npinfer.operation, "MOST_KNOWN", 1)
    asked, both = [], threading.Barrier(2)

    def rule(x):
        asked.append(x.shape)
        if len(x.shape) == 2:
            both.wait(20)  # two threads find room for one, and each takes it
        return x, ()

    remembering = npinfer.operation.operation(rule)(lambda x: x)
    threads = [threading.Thread(target=remembering, args=(Array(spec((n, n))),)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shape in ((3,), (4,), (3,)):
        remembering(Array(spec(shape)))
    assert asked[2:] == [(3,), (4,), (3,)]  # one was remembered at a time
