"""What a storage format costs in accuracy: the figures of `logits_error`, and the formats against each other."""

import math

import numpy as np
import pytest
from strategies import T1, some_tokens

from npinfer import ModelConfig, Precision, ShapeError, Transformer
from npinfer.compare import logits_error

# Formats must show in the order of their bits, which takes more weights than T1 has.
MODEL = ModelConfig(n_layers=2, d_model=160, n_heads=4, n_kv_heads=2, d_ff=200, vocab_size=300)


def logits_of(config, weights, kv, tokens):
    model = Transformer.random(config, precision=Precision(weights, kv, "fp32"))
    return model.prefill(tokens, model.new_cache(len(tokens)), all_logits=True)


def test_every_figure_worked_by_hand():
    reference = np.array([[0.0, math.log(3)], [2.0, 0.0]], np.float32)
    logits = np.array([[0.0, 0.0], [5.0, 0.0]], np.float32)
    error = logits_error(logits, reference)
    assert error.n_positions == 2
    assert error.rms == pytest.approx(math.sqrt((math.log(3) ** 2 + 9) / 4), rel=1e-6)
    # Two logits that differ by d have variance d * d / 4.
    assert error.relative_rms == pytest.approx(error.rms / math.sqrt((math.log(3) ** 2 / 4 + 1) / 2), rel=1e-6)
    assert error.largest == pytest.approx(3)
    assert error.same_choice == 0.5  # of equal logits the first is chosen
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-5))
    second = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert error.divergence_nats == pytest.approx((first + second) / 2, rel=1e-6)


def test_equal_logits_have_no_error():
    logits = logits_of(T1, "fp32", "fp32", some_tokens(T1, 2, 5))
    assert logits_error(logits, logits) == (10, 0.0, 0.0, 0.0, 1.0, 0.0)


def test_a_constant_for_all_logits_is_no_error_of_probabilities():
    logits = logits_of(T1, "fp32", "fp32", some_tokens(T1, 1, 5))
    error = logits_error(logits + 3, logits)
    assert (error.same_choice, error.rms) == (1.0, pytest.approx(3, rel=1e-6))
    assert error.divergence_nats == pytest.approx(0, abs=1e-6)


def test_logits_without_a_spread_have_no_relative_error():
    # One token to choose from: its logit is all there is, and its probability 1 whatever it is.
    assert logits_error(np.array([[3.0], [5.0]]), np.array([[4.0], [6.0]])) == (2, 1.0, None, 1.0, 1.0, 0.0)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ShapeError, match=r"logits are \(2, 3\) and reference \(2, 4\), expected the same"):
        logits_error(np.zeros((2, 3)), np.zeros((2, 4)))


def test_fewer_bits_cost_more():
    tokens = some_tokens(MODEL, 1, 40)
    exact = logits_of(MODEL, "fp32", "fp32", tokens)
    formats = [("fp16", "fp32"), ("bf16", "fp32"), ("int8", "fp32"), ("int4", "fp32")]
    errors = [logits_error(logits_of(MODEL, *each, tokens), exact) for each in formats]
    for fewer, more in zip(errors, errors[1:]):
        assert 0 < fewer.relative_rms < more.relative_rms
        assert fewer.divergence_nats < more.divergence_nats
    # Rounding to steps of s errs by s / sqrt(12); in int4 s is a seventh of the largest of 128, some 2.6 sigma: a
    # weight errs by some 0.11 sigma, each of a dozen products by 11 %, and they add up as the root of their number.
    assert 0.11 < errors[-1].relative_rms < 0.11 * math.sqrt(12) * 1.5


@pytest.mark.parametrize("kv, least, most", [("fp16", 0, 2**-10), ("int8", 2**-10, 0.02)])
def test_a_narrow_kv_cache_costs_little(kv, least, most):
    tokens = some_tokens(MODEL, 1, 40)
    error = logits_error(logits_of(MODEL, "fp32", kv, tokens), logits_of(MODEL, "fp32", "fp32", tokens))
    assert least < error.relative_rms < most
