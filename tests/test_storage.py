"""Weights that stay in their format: every bit pattern widened, and models that compute the same in less memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npinfer import ModelConfig, Precision, Transformer, generate
from npinfer.formats import FORMATS, NUMERIC, quantised, rounded
from npinfer.products import TILE_ELEMENTS
from npinfer.storage import packed, widen
from strategies import any_config, run, some_tokens

PATTERNS = np.arange(2**16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)


def widened(kept):
    out = np.full(kept.shape, np.nan, np.float32)
    widen(kept, out)
    return out


def test_every_bf16_is_the_upper_half_of_a_float32():
    expected = (PATTERNS.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.array_equal(widened(PATTERNS).view(np.uint32), expected.view(np.uint32))


def test_every_finite_fp16_keeps_its_value():
    halves = PATTERNS.view(np.float16)
    finite = np.isfinite(halves)
    assert finite.sum() == 2 * 31 * 1024  # 31 exponents of finite numbers, two signs
    expected, found = halves.astype(np.float32), widened(halves)
    assert np.array_equal(found[finite], expected[finite])
    assert np.array_equal(np.signbit(found[finite]), np.signbit(expected[finite]))


def test_every_code_keeps_its_value():
    codes = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    assert np.array_equal(widened(codes).ravel(), np.arange(-128, 128))


@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]), name=st.sampled_from(["bf16", "fp16"]))
def test_packing_rounds_as_rounding_does(seed, scale, name):
    values = (np.random.default_rng(seed).standard_normal((5, 7)) * scale).astype(np.float32)
    kept = packed(values, FORMATS[name])
    assert kept.itemsize == 2
    assert np.array_equal(widened(kept), rounded(values, FORMATS[name]))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_take_a_byte(name):
    codes, _ = quantised(np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32), FORMATS[name])
    kept = packed(codes, FORMATS[name])
    assert kept.dtype == np.int8 and np.array_equal(kept, codes)


@settings(max_examples=40)
@given(config=any_config(), weights=st.sampled_from(NUMERIC["weights"]), batch=st.integers(1, 2), n_new=st.integers(1, 5))
def test_a_packed_model_computes_and_counts_the_same(config, weights, batch, n_new):
    precision, tokens = Precision(weights, "fp32", "fp32"), some_tokens(config, batch, n_new + 2)
    runs = [run(Transformer.random(config, 3, precision, pack=pack), tokens, [n_new], 2) for pack in (False, True)]
    (ledger, _, logits), (packed_ledger, _, packed_logits) = runs
    assert list(ledger.entries()) == list(packed_ledger.entries())
    for expected, found in zip(logits, packed_logits):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights, share", [("fp32", 1.0), ("bf16", 0.5), ("fp16", 0.5), ("int8", 0.25), ("int4", 0.25)])
def test_several_tiles_and_less_memory(weights, share):
    """Matrices of more than one tile; a scale and a bias here and there is all that is more than the share."""
    config = ModelConfig(n_layers=1, d_model=600, n_heads=6, n_kv_heads=2, d_ff=900, vocab_size=700, mlp_bias=True)
    assert config.vocab_size * config.d_model > TILE_ELEMENTS
    models = [Transformer.random(config, precision=Precision(weights, "fp32", "fp32"), pack=pack) for pack in (False, True)]
    sizes = [sum(values.nbytes for values in model.weights.values()) for model in models]
    assert share <= sizes[1] / sizes[0] < share + 0.02
    tokens = some_tokens(config, 1, 5)
    first, second = [generate(model, tokens, 6) for model in models]
    assert first.tokens.tolist() == second.tokens.tolist()


def test_what_fp16_makes_infinite_is_kept_as_float32():
    values = np.array([[1.0, 1e6], [-1e6, 0.5]], np.float32)
    assert packed(values, FORMATS["fp16"]).tolist() == [[1.0, np.inf], [-np.inf, 0.5]]
    assert packed(values, FORMATS["fp16"]).dtype == np.float32
    assert packed(values[:, :1][:1], FORMATS["fp16"]).dtype == np.float16
