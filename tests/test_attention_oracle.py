"""Attention and the expansion of latent rows against independent answers, as in test_ops_oracle."""

import math
import re
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npinfer import attention, ops
from npinfer.config import ModelConfig
from npinfer.errors import ShapeError
from npinfer.formats import ALLOWED, FORMATS
from npinfer.kvcache import KVCache
from npinfer.ledger import Counts
from npinfer.specs import Array, spec
from oracle import (
    CHECKS, FP32, Case, a_matrix, dims, matrix_formats, multiplied, n_retained, numbers, stored, windows,
)  # fmt: skip
from tally import Tally

weight_formats, kv_formats, activation_formats = (
    st.sampled_from([FORMATS[name] for name in ALLOWED[field]]) for field in ("weights", "kv", "activations")
)
softcaps = st.none() | st.sampled_from([0.5, 20.0])


# ---- cases


def attention_by_definition(q, k, v, sinks, scale, window, softcap):
    """One query at a time, over a list of the keys that it sees; a sink takes its share and gives nothing."""
    batch, n_heads, n_new, _ = q.shape
    n_keys, group, value_dim = k.shape[2], n_heads // k.shape[1], v.shape[3]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.empty((batch, n_new, n_heads, value_dim))
    for b, h, t in np.ndindex(batch, n_heads, n_new):
        position = n_keys - n_new + t
        seen = [j for j in range(n_keys) if j <= position and (window is None or position - j < window)]
        scores = [scale * (q[b, h, t] @ k[b, h // group, j]) for j in seen]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else math.exp(sinks[h]))
        out[b, t, h] = (weights / total) @ v[b, h // group, seen]
    return out.reshape(batch * n_new, n_heads * value_dim)


@st.composite
def attentions(draw, lengths=dims):
    """int8 rows have their scale as one more column; keys and values that are activations (a latent's) have none."""
    batch, n_kv_heads, group, head_dim, value_dim = (draw(st.integers(1, 3)) for _ in range(5))
    n_new, window, softcap = draw(lengths), draw(windows), draw(softcaps)
    n_heads, n_keys = n_kv_heads * group, n_retained(draw(st.integers(0, 6)), window) + n_new
    format_, has_sinks = draw(st.sampled_from([FP32, FORMATS["int8"]])), draw(st.booleans())
    role, scaled = ("kv", True) if format_ == "int8" else (draw(st.sampled_from(["kv", "activation"])), False)
    k, v = [spec((batch, n_kv_heads, n_keys, width), format_, role) for width in (head_dim, value_dim)]
    rows = [numbers(width + scaled, n_keys, n_kv_heads, batch, seed=i).T for i, width in enumerate((head_dim, value_dim))]
    static = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}

    def reference(q, k, v, sinks):
        k, v = [x[..., :-1] * x[..., -1:] if scaled else x for x in (k, v)]
        return attention_by_definition(q, k, v, sinks, **static)

    return Case(
        attention.attention,
        (
            spec((batch, n_heads, n_new, head_dim), FP32), k, v,
            spec((n_heads,), FP32, "weight", "softmax") if has_sinks else None,
        ),
        (numbers(batch, n_heads, n_new, head_dim), *rows, numbers(n_heads) if has_sinks else None),
        static,
        reference,
    )  # fmt: skip


@st.composite
def expansions(draw):
    batch, n_keys, n_heads, rank, nope, rope_dim, value_dim = (draw(st.integers(1, 4)) for _ in range(7))
    rows_format = draw(st.sampled_from([FP32, FORMATS["int8"]]))
    scaled, width = rows_format == "int8", rank + rope_dim
    pairs, w = a_matrix(["kv_expand"], [n_heads * (nope + value_dim)], rank, draw(matrix_formats))

    def reference(rows, w):
        rows = rows[..., :-1] * rows[..., -1:] if scaled else rows
        keys, values = np.empty((batch, n_heads, n_keys, nope + rope_dim)), np.empty((batch, n_heads, n_keys, value_dim))
        for b in range(batch):
            expanded = multiplied(rows[b, 0, :, :rank], w).reshape(n_keys, n_heads, nope + value_dim)
            for h in range(n_heads):
                keys[b, h] = np.concatenate([expanded[:, h, :nope], rows[b, 0, :, rank:]], axis=1)
                values[b, h] = expanded[:, h, nope:]
        return [keys, values]

    return Case(
        attention.kv_expand,
        (spec((batch, 1, n_keys, width), rows_format, "kv"), pairs),
        (numbers(batch, 1, n_keys, width + scaled), w),
        {"n_heads": n_heads, "rope_dim": rope_dim, "value_dim": value_dim, "format_": FP32},
        reference,
    )


CASES = {"attention": attentions(), "kv_expand": expansions()}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@given(data=st.data())
def test_every_operation(cases, check, data):
    check(data.draw(cases))


# ---- the parts of attention


@given(shape=st.tuples(dims, dims, dims, dims))
def test_softmax_executes_its_part_of_the_rule(shape):
    batch, n_heads, n_new, n_past = shape
    n_keys = n_past + n_new
    q, kv = spec((batch, n_heads, n_new, 2), FP32), spec((batch, n_heads, n_keys, 2), FP32, "kv")
    _, costs = attention.attention.rule(q, kv, kv, None, scale=0.5, window=None)
    tally = Tally()
    attention.softmax(tally.watch(numbers(batch, n_heads, n_new, n_keys)))
    assert (dict(costs)["softmax"].matmul_flops, dict(costs)["softmax"].elementwise_flops) == tally.flops


@given(shape=st.tuples(dims, dims, dims, dims))
def test_softmax_with_sinks_executes_its_part_of_the_rule(shape):
    batch, n_heads, n_new, n_past = shape
    n_keys = n_past + n_new
    q, kv = spec((batch, n_heads, n_new, 2), FP32), spec((batch, n_heads, n_keys, 2), FP32, "kv")
    sinks = spec((n_heads,), FP32, "weight", "softmax")
    _, costs = attention.attention.rule(q, kv, kv, sinks, scale=0.5, window=None)
    tally = Tally()
    column = tally.watch(numbers(n_heads, 1, 1))
    attention.softmax_with(column, tally.watch(numbers(batch, n_heads, n_new, n_keys)))
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
    _, costs = attention.attention.rule(spec((batch, n_heads, n_new, head_dim), FP32), kv, kv, None, scale=1.0, window=window)
    masked = {op: counts.masked_flops for op, counts in costs}
    per_product = 2 * batch * n_heads * head_dim * hidden
    assert masked == {"attn_scores": per_product, "softmax": 0, "attn_mix": per_product}


@given(chunks=st.lists(st.integers(1, 6), min_size=1, max_size=4), window=windows)
def test_needed_flops_do_not_depend_on_how_a_prompt_is_chunked(chunks, window):
    def needed(chunks):
        total, n_past = 0, 0
        for n_new in chunks:
            kv = spec((1, 1, n_retained(n_past, window) + n_new, 2), FP32, "kv")
            _, costs = attention.attention.rule(spec((1, 1, n_new, 2), FP32), kv, kv, None, scale=1.0, window=window)
            total += sum(counts.needed_flops for _, counts in costs)
            n_past += n_new
        return total

    assert needed(chunks) == needed([sum(chunks)])


# ---- attention: known answers


def attend(q, k, v, window=None):
    return attention.attention.__wrapped__(q, k, v, None, scale=q.shape[-1] ** -0.5, window=window)


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


@pytest.mark.parametrize("n_new", [1, 3])
def test_a_sink_of_zero_is_one_more_key_without_a_value(n_new):
    """Scores are 0: each of n keys has weight 1 / (n + 1), and V of 1 comes back as n / (n + 1)."""
    q = np.zeros((1, 2, n_new, 4), np.float32)
    k, v, sinks = np.zeros((1, 1, 5, 4), np.float32), np.ones((1, 1, 5, 2), np.float32), np.zeros(2, np.float32)
    out = attention.attention.__wrapped__(q, k, v, sinks, scale=1.0, window=None)
    seen = np.arange(5 - n_new + 1, 6)
    np.testing.assert_allclose(out, np.repeat(seen[:, None] / (seen[:, None] + 1), 4, axis=1), rtol=1e-6)


@pytest.mark.parametrize("n_new", [1, 4])
def test_a_large_sink_drinks_everything_and_a_small_one_nothing(n_new):
    q, k, v = numbers(1, 2, n_new, 4), numbers(1, 1, 5, 4), numbers(1, 1, 5, 2)
    sinks = np.array([1e4, -1e4], np.float32)
    out = attention.attention.__wrapped__(q, k, v, sinks, scale=1.0, window=None).reshape(n_new, 2, 2)
    without = attention.attention.__wrapped__(q, k, v, None, scale=1.0, window=None).reshape(n_new, 2, 2)
    np.testing.assert_array_equal(out[:, 0], 0)
    np.testing.assert_allclose(out[:, 1], without[:, 1], rtol=1e-6)


# ---- bytes: the contract, row by row, from shapes and bits worked out here


@given(
    sizes=st.tuples(dims, dims, dims, dims, dims, dims),
    n_past=st.integers(0, 6),
    kv=st.tuples(kv_formats, st.just("kv")) | st.tuples(st.none(), st.just("activation")),
    a=activation_formats,
    softcap=softcaps,
    has_sinks=st.booleans(),
)
def test_attention_moves_scores_in_its_parts_and_shares_the_read_of_kv(sizes, n_past, kv, a, softcap, has_sinks):
    """Keys and values of a cache are kv bytes, those that a latent was expanded to are activations."""
    batch, n_kv_heads, group, n_new, head_dim, value_dim = sizes
    n_heads, n_keys, c = n_kv_heads * group, n_past + n_new, kv[0] or a
    k, v = [spec((batch, n_kv_heads, n_keys, width), c, kv[1]) for width in (head_dim, value_dim)]
    q, vector = spec((batch, n_heads, n_new, head_dim), a), FORMATS["bf16"]
    sinks = spec((n_heads,), vector, "weight", "softmax") if has_sinks else None
    out, costs = attention.attention.rule(q, k, v, sinks, scale=1.0, window=None, softcap=softcap)
    pairs, n_rows = batch * n_heads * n_new * n_keys, batch * n_heads * n_new
    queries, mixed = stored((n_rows, head_dim), a), stored((n_rows, value_dim), a)
    score, row_scores = stored((pairs,), a), stored((n_rows, n_keys + has_sinks), a)
    n_kv_rows = batch * n_keys * n_kv_heads
    keys, values = [stored((n_kv_rows, width), c) for width in (head_dim, value_dim)]  # int8: each row with its scale
    scales = pairs if c == "int8" else 0
    later = batch * n_heads * (n_new * (n_new - 1) // 2)  # pairs with a key after the query
    read = "kv_bytes_read" if kv[1] == "kv" else "activation_bytes_read"
    assert dict(costs) == {
        "attn_scores": Counts(
            matmul_flops=2 * pairs * head_dim,
            masked_flops=2 * later * head_dim,
            elementwise_flops=pairs + scales + (3 * pairs if softcap else 0),
            score_bytes_written=score,
            activation_bytes_read=queries,
        )
        + Counts(**{read: keys}),
        "softmax": Counts(
            elementwise_flops=n_rows * (5 * (n_keys + has_sinks) - 2),
            weight_bytes_read=2 * n_heads if has_sinks else 0,
            score_bytes_read=row_scores,
            score_bytes_written=row_scores,
        ),
        "attn_mix": Counts(
            matmul_flops=2 * pairs * value_dim,
            masked_flops=2 * later * value_dim,
            elementwise_flops=scales,
            score_bytes_read=score,
            activation_bytes_written=mixed,
        )
        + Counts(**{read: values}),
    }
    assert (out.shape, out.format) == ((batch * n_new, n_heads * value_dim), a)


@given(
    sizes=st.tuples(dims, dims, dims, st.sampled_from([1, 4, 129]), dims, dims, dims),
    w=weight_formats,
    c=kv_formats,
    a=activation_formats,
)
def test_kv_expand_reads_every_row_of_the_cache_and_writes_keys_and_values(sizes, w, c, a):
    batch, n_keys, n_heads, rank, nope, rope_dim, value_dim = sizes
    matrix = spec((n_heads * (nope + value_dim), rank), w, "weight", "kv_expand")
    rows = spec((batch, 1, n_keys, rank + rope_dim), c, "kv")
    static = {"n_heads": n_heads, "rope_dim": rope_dim, "value_dim": value_dim, "format_": a}
    (keys, values), costs = attention.kv_expand.rule(rows, ((matrix, None),), **static)
    n, d_out = batch * n_keys, n_heads * (nope + value_dim)
    widening = {"int8": n * d_out, "int4": rank * d_out}.get(str(w), 0) + (n * (rank + rope_dim) if c == "int8" else 0)
    shapes = [(batch, n_heads, n_keys, width) for width in (nope + rope_dim, value_dim)]
    assert costs == (
        (
            "kv_expand",
            Counts(
                matmul_flops=2 * n * rank * d_out,
                elementwise_flops=widening,
                weight_bytes_read=stored((d_out, rank), w),
                kv_bytes_read=stored((n, rank + rope_dim), c),
                activation_bytes_written=sum([stored(shape, a) for shape in shapes]),
            ),
        ),
    )
    assert [(x.shape, x.format, x.role) for x in (keys, values)] == [(shape, a, "activation") for shape in shapes]


# ---- operands that do not fit


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
        attention.attention.rule(spec(q, FP32), spec(k, FP32, "kv"), spec(v, FP32, "kv"), None, scale=1.0, window=None)


def test_kv_expand_refuses_rows_of_another_width():
    rows, matrix = spec((1, 1, 3, 7), FP32, "kv"), spec((10, 4), FP32, "weight", "kv_expand")
    message = "kv_expand: rows are (1, 1, 3, 7) but w is (10, 4) for 2 heads and 2 rotated"
    with pytest.raises(ShapeError, match=re.escape(message)):
        attention.kv_expand.rule(rows, ((matrix, None),), n_heads=2, rope_dim=2, value_dim=2, format_=FP32)
