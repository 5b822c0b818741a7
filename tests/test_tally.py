"""The oracle has tests too: it counts small cases as one does by hand, and it catches planted faults."""

import numpy as np
import pytest
from tally import Element, Tally, Watched, values

from npinfer import activations, attention, ops, products
from npinfer.formats import FORMATS
from npinfer.specs import spec
from npinfer.weights import Matrix

FP32, INT8 = FORMATS["fp32"], FORMATS["int8"]


def numbers(*shape):
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def watched(*shape):
    tally = Tally()
    return tally, tally.watch(numbers(*shape))


# ---- counts that can be done by hand


@pytest.mark.parametrize(
    "body, flops",
    [
        (lambda x: x + 1, (0, 6)),
        (lambda x: 1 - x, (0, 6)),
        (lambda x: np.float32(2) * x, (0, 6)),
        (lambda x: 1 / x, (0, 6)),
        (lambda x: np.exp(x) + np.sqrt(x * x) + np.tanh(x), (0, 36)),  # exp, times, root, tanh and two sums
        (lambda x: -x, (0, 0)),
        (lambda x: x[0], (0, 0)),
        (lambda x: x.T.reshape(3, 2).swapaxes(0, 1)[:, None], (0, 0)),
        (lambda x: x > 0, (0, 0)),
        (lambda x: np.where(x > 0, x, -np.inf), (0, 0)),
        (lambda x: np.concatenate([x, x]), (0, 0)),
        (lambda x: np.maximum(x, 0), (0, 6)),
        (lambda x: x.sum(), (0, 5)),
        (lambda x: np.add.reduce(x, axis=-1), (0, 4)),  # 2 rows, 3 - 1
        (lambda x: x.max(axis=-1, keepdims=True), (0, 4)),
        (lambda x: x.argmax(axis=-1), (0, 4)),
        (lambda x: x.mean(axis=0), (0, 6)),  # 3 columns, 2 - 1 and a division
        (lambda x: x @ x.T, (24, 0)),  # 2 * 2 * 3 * 2
        (lambda x: x[0] @ x[1], (6, 0)),
        (lambda x: np.matmul(x[None, :, None], x[:, None, :, None]), (24, 0)),  # 2 x 2 dot products
        (lambda x: (x @ x.T + 1) * 2, (24, 8)),
    ],
)
def test_counts_done_by_hand(body, flops):
    tally, x = watched(2, 3)
    body(x)
    assert tally.flops == flops


def test_writing_in_place_counts_what_it_computes_and_keeps_the_array():
    tally, x = watched(2, 3)
    y = x
    y *= 2
    np.exp(y, out=y)
    np.divide(1, y, out=y)
    assert y is x
    assert tally.flops == (0, 18)
    np.testing.assert_allclose(values(x), np.exp(-2 * numbers(2, 3).astype(np.float64)))


def test_a_products_result_can_be_written_to_an_array_of_its_own():
    tally, x = watched(2, 3)
    out = np.empty((2, 2), x.dtype)
    np.matmul(x, x.T, out=out)
    assert tally.flops == (24, 0)
    np.testing.assert_allclose(values(out), numbers(2, 3) @ numbers(2, 3).T, rtol=1e-6)


def test_values_are_carried_unchanged():
    tally, x = watched(2, 3)
    assert isinstance(x, Watched)
    assert isinstance(x[0, 0], Element)
    np.testing.assert_array_equal(values(x), numbers(2, 3))
    assert tally.flops == (0, 0)


def test_constants_written_among_model_data_count_as_model_data():
    tally, x = watched(1, 4)
    np.copyto(x, -np.inf, where=np.array([True, True, True, False]))
    x.max(axis=-1)
    assert tally.flops == (0, 3)  # though two of its three comparisons are -inf with -inf


def test_arithmetic_on_constants_alone_is_free():
    tally, x = watched(2, 3)
    x * (np.arange(3) * 2 + 1)
    assert tally.flops == (0, 6)


def test_tallies_do_not_mix():
    (first, x), (second, y) = watched(2, 3), watched(2, 2)
    x + x
    y @ y
    assert (first.flops, second.flops) == ((0, 6), (16, 0))


def test_a_product_that_fails_is_left():
    tally, x = watched(2, 3)
    with pytest.raises(ValueError, match="matmul"):
        x @ x
    x * x
    assert tally.flops == (0, 6)


@pytest.mark.parametrize(
    "escape",
    [
        lambda x: x.astype(np.float32),
        lambda x: np.asarray(x, np.float64) * 2,
        lambda x: float(x[0, 0]),
        lambda x: np.add(x, 1, out=np.empty((2, 3), np.float32)),
        lambda x: np.add.reduce(x, axis=-1, dtype=np.float32),
        lambda x: np.zeros((2, 3), np.float32).__setitem__(slice(None), x),
        lambda x: x**2,
        lambda x: np.abs(x),
        lambda x: np.log(x),
    ],
    ids=["astype", "asarray", "float", "out", "dtype", "assign", "power", "abs", "log"],
)
def test_arithmetic_that_would_not_be_seen_is_refused(escape):
    tally, x = watched(2, 3)
    with pytest.raises(TypeError):
        escape(x)


# ---- planted faults: each body computes the right thing, or nearly, at another cost than the rule declares


def softmax_with_one_multiplication_more(scores):
    return attention.softmax(scores * 1.0)


def softmax_that_sums_twice(scores):
    scores = attention.softmax(scores)
    scores.sum(axis=-1)
    return scores


def softmax_without_its_max(scores):
    scores = np.exp(scores)
    return scores / scores.sum(axis=-1, keepdims=True)


def softmax_of_reciprocals(scores):
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores * (1 / scores.sum(axis=-1, keepdims=True))


def attention_with(softmax=attention.softmax, multiply=np.matmul):
    """A plain attention, to plant faults in."""

    def body(q, k, v, sinks, scale, window):
        n_heads, n_new, n_keys = q.shape[1], q.shape[2], k.shape[2]
        k, v = (np.repeat(x, n_heads // x.shape[1], axis=1) for x in (k, v))
        scores = multiply(q, k.swapaxes(-1, -2)) * scale
        scores = np.where(attention.hidden(n_keys - n_new, n_keys, window), -np.inf, scores)
        return multiply(softmax(scores), v)

    return body


def attention_of_the_causal_part_alone(q, k, v, sinks, scale, window):
    n_new, n_keys = q.shape[2], k.shape[2]
    rows = []
    for t in range(n_new):
        seen = n_keys - n_new + t + 1
        row = slice(t, t + 1)
        rows.append(attention_with()(q[:, :, row], k[:, :, :seen], v[:, :, :seen], None, scale, None))
    return np.concatenate(rows, axis=2)


def attention_that_scales_q(q, k, v, sinks, scale, window):
    return attention_with()(q * scale, k, v, None, 1.0, window)


def product_by_elements(a, b):
    return (a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :]).sum(axis=-1)


def norm_by_reciprocal(gain, x, eps):
    return x * (1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1] + eps)) * gain


def norm_that_divides_before_it_sums(gain, x, eps):
    return x / np.sqrt((x * x / x.shape[-1]).sum(axis=-1, keepdims=True) + eps) * gain


def norm_without_eps(gain, x, eps):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1]) * gain


def linear_that_multiplies_twice(x, w):
    x @ w.rows.T
    return products.linear.__wrapped__(x, w)


def linear_by_elements(x, w):
    return product_by_elements(x, w.rows.T) * w.scales[:, 0] + w.bias


def linear_that_scales_its_weights(x, w):
    return x @ (w.rows * w.scales).T + w.bias


def linear_without_bias(x, w):
    return x @ w.rows.T * w.scales[:, 0]


def rope_that_copies_first(rows, rotation, **static):
    return ops.rope.__wrapped__(rows * 1.0, rotation, **static)


def swiglu_by_a_product(gate, up):
    return gate * (1 / (1 + np.exp(-gate))) * up


def residual_of_half_the_rows(x, y):
    half = len(x) // 2
    return np.concatenate([x[:half] + y[:half], x[half:]])


def sample_that_scales_first(logits):
    return [max(range(len(row)), key=lambda i: row[i] * 1.0) for row in logits]


def embed_that_scales(tokens, table, positions):
    return table.rows[tokens.ravel()] * 1.0


KV = spec((2, 2, 5, 4), FP32, "kv")
LINEAR = ((spec((6, 4), INT8, "weight", "q_proj"), spec((6,), FP32, "weight", "q_proj")),)
# operation, specs and operands of a case, static parameters, bodies at fault
PLANTED = [
    (
        attention.attention,
        (spec((2, 4, 3, 4), FP32), KV, KV, None),
        (numbers(2, 4, 3, 4), numbers(2, 2, 5, 4), numbers(2, 2, 5, 4), None),
        {"scale": 0.5, "window": None},
        [
            attention_with(softmax_with_one_multiplication_more),
            attention_with(softmax_that_sums_twice),
            attention_with(softmax_without_its_max),
            attention_with(softmax_of_reciprocals),
            attention_with(multiply=product_by_elements),
            attention_of_the_causal_part_alone,
            attention_that_scales_q,
        ],
    ),
    (
        ops.rms_norm,
        (spec((4,), FP32, "weight", "attn_norm"), spec((3, 4), FP32)),
        (numbers(4), numbers(3, 4)),
        {"eps": 1e-5},
        [norm_by_reciprocal, norm_that_divides_before_it_sums, norm_without_eps],
    ),
    (
        products.linear,
        (spec((3, 4), FP32), LINEAR),
        (numbers(3, 4), Matrix(numbers(6, 4), numbers(6, 1), numbers(6), (slice(0, 6),), INT8, False)),
        {},
        [linear_that_multiplies_twice, linear_by_elements, linear_that_scales_its_weights, linear_without_bias],
    ),
    (
        ops.rope,
        (spec((3, 8), FP32), spec((2, 3, 1, 2, 2), None, "constant")),
        (numbers(3, 8), numbers(2, 3, 1, 2, 2)),
        {"head_dim": 4, "turned": (2,)},
        [rope_that_copies_first],
    ),
    (activations.swiglu, (spec((3, 4), FP32),) * 2, (numbers(3, 4), numbers(3, 4)), {}, [swiglu_by_a_product]),
    (
        ops.attn_residual,
        (spec((3, 4), FP32),) * 2,
        (numbers(3, 4), numbers(3, 4)),
        {},
        [residual_of_half_the_rows],
    ),
    (ops.sample, (spec((3, 4), FP32),), (numbers(3, 4),), {}, [sample_that_scales_first]),
    (
        ops.embed,
        (spec((1, 3), FP32, "token"), spec((5, 4), FP32, "weight", "embed"), None),
        (np.array([[0, 4, 4]]), Matrix(numbers(5, 4), None, None, (slice(0, 5),), FP32, False), None),
        {},
        [embed_that_scales],
    ),
]


def executed(body, operands, static):
    """What the oracle sees `body` do."""
    tally = Tally()
    watched = []
    for x in operands:
        if isinstance(x, Matrix):
            x = Matrix(*[tally.watch(part) if isinstance(part, np.ndarray) else part for part in x])
        elif x is not None and x.dtype == np.float32:
            x = tally.watch(x)
        watched.append(x)
    body(*watched, **static)
    return tally.flops


def declared(operation, specs, static):
    costs = [counts for _, counts in operation.rule(*specs, **static)[1]]
    return sum(counts.matmul_flops for counts in costs), sum(counts.elementwise_flops for counts in costs)


@pytest.mark.parametrize(
    "operation, specs, operands, static, fault",
    [(*case, fault) for *case, faults in PLANTED for fault in faults],
)
def test_planted_faults_are_caught(operation, specs, operands, static, fault):
    assert executed(operation.__wrapped__, operands, static) == declared(operation, specs, static)
    assert executed(fault, operands, static) != declared(operation, specs, static)


def test_the_attention_that_faults_are_planted_in_is_right_without_them():
    _, specs, operands, static, _ = PLANTED[0]
    assert executed(attention_with(), operands, static) == declared(attention.attention, specs, static)


def test_a_fault_in_a_rule_is_caught_too():
    _, specs, operands, static, _ = PLANTED[1]
    matmul, elementwise = declared(ops.rms_norm, specs, static)
    n = specs[1].shape[0]
    assert executed(ops.rms_norm.__wrapped__, operands, static) != (matmul, elementwise - n)  # a sum of d, not d - 1
