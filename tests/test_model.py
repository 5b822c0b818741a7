"""What a numeric run computes: against a second implementation, against itself in other orders, and after errors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from intercept import replace_operation
from npinfer import CacheError, InputError, Ledger, ModelConfig, Precision, Transformer
from npinfer import attention, generate, kvcache
from strategies import FP32, LLAMA3, T1, batches, cached_rows, chunkings, configs, model_and_tensors, run, some_tokens

SMALL = settings(max_examples=30)
OPERATIONS = (
    "embed", "rms_norm", "linear_side_by_side", "rope", "kv_append", "attention", "linear", "attn_residual", "swiglu",
    "mlp_residual",
)  # fmt: skip
WINDOWED = ModelConfig(
    n_layers=3, d_model=8, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=10, vocab_size=13, sliding_window=3,
    qkv_bias=True, o_bias=True, mlp_bias=True, rope_scaling=LLAMA3,
)
LARGE = ModelConfig(  # the shape of a real layer, small enough for the reference's loops
    n_layers=4, d_model=96, n_heads=6, n_kv_heads=2, head_dim=20, d_ff=250, vocab_size=300, rope_theta=5e5, norm_eps=1e-6,
)


def close(actual, expected, tolerance=1e-4):
    # Rows of a few elements make a norm ill-conditioned: two orders of summation differ by some 1e-5.  A wrong
    # position, head or mask differs by some tenths.
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def whole(model, tokens):
    """Logits (B, T, vocab) of all positions, from one prefill and an empty cache."""
    return model.prefill(tokens, model.new_cache(len(tokens)), all_logits=True)


# ---- the equations


@SMALL
@given(configs(), batches, st.integers(1, 9))
@example(WINDOWED, 2, 9)
@example(LARGE, 1, 12)
def test_logits_equal_the_reference(config, batch, n_tokens):
    model, tensors = model_and_tensors(config)
    tokens = some_tokens(config, batch, n_tokens)
    logits = whole(model, tokens)
    for row in range(batch):
        np.testing.assert_allclose(logits[row], reference.logits(tokens[row], tensors, config), rtol=1e-4, atol=1e-5)


@SMALL
@given(configs(), st.sampled_from(["fp16", "bf16", "int8", "int4"]), st.integers(0, 50))
@example(LARGE, "int8", 0)
@example(LARGE, "int4", 0)
@example(LARGE, "bf16", 0)
def test_weights_are_rounded_to_their_format_and_computed_in_float32(config, weights, seed):
    model, tensors = model_and_tensors(config, Precision(weights=weights, kv="fp32"), seed)
    (tokens,) = some_tokens(config, 1, 5)
    expected = reference.logits(tokens, reference.stored(tensors, weights), config)
    np.testing.assert_allclose(whole(model, tokens[None])[0], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - reference.logits(tokens, tensors, config)).max() > 1e-6  # the format shows


@pytest.mark.parametrize("kv, relative", [("fp32", 2**-18), ("fp16", 2**-11), ("bf16", 2**-8)])
def test_cached_rows_are_rounded_to_their_format(kv, relative):
    """In the first layer, where nothing that was rounded has come in yet, K and V differ from the reference by half an ulp."""
    model, tensors = model_and_tensors(LARGE, Precision(weights="fp32", kv=kv))
    (tokens,) = some_tokens(LARGE, 1, 8)
    cache = model.new_cache()
    model.prefill(tokens[:5], cache)
    for token in tokens[5:]:
        model.decode([token], cache)
    exact = reference.rows_of_first_layer(tokens, tensors, LARGE)
    for rows, expected in zip(cached_rows(cache, 0), exact):
        assert rows.dtype == np.float32
        assert np.array_equal(rows[0], reference.ROUND[kv](rows[0]))
        np.testing.assert_allclose(rows[0], expected, rtol=relative * 1.001, atol=1e-6)
        assert kv == "fp32" or not np.allclose(rows[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_an_int8_cache_holds_codes_with_a_scale_for_each_row(window):
    model = Transformer.random(replace(LARGE, sliding_window=window), precision=Precision("fp32", "int8"))
    exact = Transformer.random(replace(LARGE, sliding_window=window), precision=FP32)
    (tokens,) = some_tokens(LARGE, 1, 8)
    caches = [each.new_cache() for each in (model, exact)]
    for cache, each in zip(caches, (model, exact)):
        each.prefill(tokens[:5], cache)
        for token in tokens[5:]:
            each.decode([token], cache)
    for rows, expected in zip(cached_rows(caches[0], 0), cached_rows(caches[1], 0)):
        codes, scales = rows[0, ..., :-1], rows[0, ..., -1]
        assert rows.dtype == np.float32 and np.abs(codes).max() == 127
        assert np.array_equal(codes, np.rint(codes))
        held = np.stack([reference.int8(head) for head in expected[0]])  # in the first layer nothing rounded has come in yet
        np.testing.assert_allclose(codes * scales[..., None], held, rtol=1e-6)


def test_attention_reads_keys_and_values_as_stored():
    """A prefill sees its own rows rounded, as the decode steps after it do."""
    model = Transformer.random(LARGE, precision=Precision(kv="bf16"))
    exact = Transformer.random(LARGE, precision=Precision(kv="fp32"))
    tokens = some_tokens(LARGE, 1, 6)
    _, _, logits = run(model, tokens, [1], 5)
    close(whole(model, tokens)[:, -1], logits[-1], 2e-3)
    assert np.abs(whole(model, tokens) - whole(exact, tokens)).max() > 1e-4


# ---- one request in many ways


@SMALL
@given(configs(), batches, chunkings, st.integers(0, 3))
@example(WINDOWED, 1, [5, 3], 0)
@example(WINDOWED, 1, [2, 2, 4], 0)
@example(WINDOWED, 1, [1] * 8, 0)
def test_every_split_of_a_prompt_gives_its_logits(config, batch, chunks, n_decoded):
    model = Transformer.random(config, precision=FP32)
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    _, cache, logits = run(model, tokens, chunks, n_decoded, all_logits=True)
    whole_prompt = whole(model, tokens)
    close(np.concatenate([part.reshape(batch, -1, config.vocab_size) for part in logits], axis=1), whole_prompt)
    assert cache.length == tokens.shape[1]
    close(model.prefill(tokens, model.new_cache(batch)), whole_prompt[:, -1])


@pytest.mark.parametrize("window", [None, 3, 8])
def test_every_cut_of_eight_tokens_gives_the_logits_of_the_whole(window):
    """Case 7, all 128 of them: the mask of a chunk starts at what is cached."""
    config = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, vocab_size=32, sliding_window=window)
    model = Transformer.random(config, precision=FP32)
    tokens = some_tokens(config, 1, 8)
    expected = whole(model, tokens)[0]
    for cuts in range(2**7):
        ends = [position for position in range(1, 8) if cuts >> position - 1 & 1] + [8]
        _, _, logits = run(model, tokens, np.diff([0, *ends]), all_logits=True)
        close(np.concatenate(logits, axis=1)[0], expected)


@pytest.mark.parametrize("config", [T1, WINDOWED, LARGE], ids=["t1", "windowed", "large"])
@pytest.mark.parametrize("seed", range(3))
def test_cached_greedy_generation_equals_recomputing_everything(config, seed):
    model, _ = model_and_tensors(config, seed=seed)
    prompt = some_tokens(config, 1, 8, seed)
    sequence, expected = prompt, []
    for _ in range(12):
        expected.append(int(whole(model, sequence)[0, -1].argmax()))
        sequence = np.append(sequence, [[expected[-1]]], axis=1)
    assert generate(model, prompt, 12).tokens.tolist() == [expected]


def test_case_1_decoded_tokens_follow_the_prompt_without_a_gap():
    model, _ = model_and_tensors(T1, scale=0.3 * 4)  # of 1 / sqrt(16)
    cache = model.new_cache(capacity=21)
    logits = model.prefill(some_tokens(T1, 1, 8), cache)
    for step in range(1, 13):
        logits = model.decode(logits.argmax(axis=-1), cache)
        assert cache.length == 8 + step
        for layer in range(T1.n_layers):
            for rows in cached_rows(cache, layer):
                assert rows.shape == (1, 2, 8 + step, 4)
                assert np.abs(rows).max(axis=-1).min() > 0  # a slot that was skipped would be all zero


def test_case_4_the_last_token_generated_has_no_row_yet():
    model = Transformer.random(T1, precision=FP32)
    prompt = some_tokens(T1, 1, 5)
    first = generate(model, prompt, 3, cache=model.new_cache())
    assert first.cache.length == 5 + 3 - 1
    assert first.tokens.shape == (1, 3)
    rest = generate(model, first.tokens[:, -1:], 4, cache=first.cache)
    assert rest.cache is first.cache
    assert np.append(first.tokens, rest.tokens).tolist() == generate(model, prompt, 7).tokens[0].tolist()


def test_case_6_positions_come_from_the_cache():
    model = Transformer.random(T1, precision=FP32)
    tokens = some_tokens(T1, 1, 9)
    cache = model.new_cache()
    model.prefill(tokens[:, :6], cache)
    again = cache.fork()
    close(model.prefill(tokens[:, 6:], cache, all_logits=True), whole(model, tokens)[:, 6:])
    # Whatever is passed is new: the whole text once more stands at positions 6 to 14.
    repeated = np.append(tokens[:, :6], tokens, axis=1)
    close(model.prefill(tokens, again, all_logits=True), whole(model, repeated)[:, 6:])
    assert again.length == 15


@SMALL
@given(configs(), st.integers(2, 3), chunkings, st.integers(0, 2))
def test_rows_of_a_batch_equal_solo_runs(config, batch, chunks, n_decoded):
    model = Transformer.random(config, precision=FP32)
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    _, _, together = run(model, tokens, chunks, n_decoded)
    for row in range(batch):
        _, _, alone = run(model, tokens[row : row + 1], chunks, n_decoded)
        close([logits[row] for logits in together], [logits[0] for logits in alone])


def test_a_long_prompt_is_worked_in_blocks_that_do_not_show(monkeypatch):
    tokens = some_tokens(WINDOWED, 2, 40)
    expected = whole(Transformer.random(WINDOWED, precision=FP32), tokens)
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1000)  # 3 queries of 2 * 4 * 40 scores
    close(whole(Transformer.random(WINDOWED, precision=FP32), tokens), expected)


def test_a_window_moves_its_rows_along_a_small_buffer(monkeypatch):
    monkeypatch.setattr(kvcache, "GROWTH_ROWS", 1)
    model = Transformer.random(WINDOWED, precision=FP32)
    tokens = some_tokens(WINDOWED, 1, 60)
    _, _, logits = run(model, tokens, [5, 1, 9], 45)
    close(np.concatenate(logits[2:]), whole(model, tokens)[0, 14:])


def test_same_seed_same_model():
    tokens = some_tokens(T1, 1, 5)
    logits = [whole(Transformer.random(T1, seed=seed, precision=FP32), tokens) for seed in (1, 1, 2)]
    assert np.array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.1


def test_order_of_the_context_shows_in_one_layer():
    """Without positions, attention of a single layer would not know [3, 7, 5] from [7, 3, 5]."""
    config = ModelConfig(n_layers=1, d_model=16, n_heads=4, head_dim=4, d_ff=24, vocab_size=32)
    model = Transformer.random(config, precision=FP32)
    logits = whole(model, np.array([[3, 7, 5], [7, 3, 5]]))
    assert np.abs(logits[0, -1] - logits[1, -1]).max() > 1e-3


# ---- what is float32, and what is not an array


def arrays_in(result):
    """The NumPy arrays of what an operation returns."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [part.data if hasattr(part, "data") and not isinstance(part, np.ndarray) else part for part in parts]


@pytest.mark.parametrize("precision", [FP32, Precision(), Precision("int8", "bf16", "fp8")], ids=str)
@pytest.mark.parametrize("config", [T1, WINDOWED], ids=["t1", "windowed"])
def test_case_41_every_intermediate_is_float32(config, precision, monkeypatch):
    seen = {}

    def watch(name, operation):
        def watched(*operands):
            result = operation(*operands)
            seen.setdefault(name, set()).update(array.dtype for array in arrays_in(result))
            return result

        return watched

    model = Transformer.random(config, precision=precision)
    for name in OPERATIONS:
        replace_operation(monkeypatch, model, name, partial(watch, name))
    monkeypatch.setattr(attention, "softmax", watch("softmax", attention.softmax))
    _, cache, logits = run(model, some_tokens(config, 2, 7), [4, 2], 1)
    assert seen == {name: {np.dtype(np.float32)} for name in (*OPERATIONS, "softmax")}
    assert all(part.dtype == np.float32 for part in logits)
    for layer in range(config.n_layers):
        assert all(rows.dtype == np.float32 for rows in cached_rows(cache, layer))


def test_case_41_cache_bytes():
    _, cache, _ = run(Transformer.random(T1, precision=FP32), some_tokens(T1, 1, 7), [6], 1)
    assert cache.nbytes == 7 * 128
    assert sum(rows.nbytes for layer in (0, 1) for rows in cached_rows(cache, layer)) == 7 * 128


def test_large_keys_and_queries_do_not_overflow():
    """Case 37: scores beyond fp16's 65,504, from fp16 weights and keys; they are float32 numbers."""
    model, _ = model_and_tensors(T1, Precision(), scale=20)
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(whole(model, some_tokens(T1, 1, 6))).all()


@pytest.mark.parametrize("use", [
    np.asarray, np.exp, np.argmax, np.sum, lambda logits: logits + 1, lambda logits: 2 * logits, lambda logits: logits @ logits,
    lambda logits: np.ones((1, 32)) + logits, lambda logits: np.ones((4, 1)) @ logits, lambda logits: np.concatenate([logits]),
    lambda logits: np.array([logits, logits]), lambda logits: np.where(logits, 0, 1), float, list,
])
def test_shape_only_arrays_refuse_numpy(use):
    model = Transformer.shape_only(T1)
    logits = model.prefill([1, 2, 3], model.new_cache())
    assert logits.shape == (1, 32)
    assert logits.nbytes == 64
    with pytest.raises(TypeError):
        use(logits)


def test_shape_only_runs_take_any_ids_and_give_shapes():
    model = Transformer.shape_only(T1)
    cache = model.new_cache(batch=2)
    assert model.prefill([[-5, 10**9], [0, 0]], cache, all_logits=True).shape == (2, 2, 32)
    assert model.decode(np.array([7, 7]), cache).shape == (2, 32)
    result = generate(model, [[1, 2]], n_output=4)
    assert result.tokens is None
    assert result.cache.length == 5


# ---- refusals leave everything as it was


def held(cache):
    return cache.length, cache.nbytes, [rows.tobytes() for layer in range(cache.config.n_layers) for rows in cached_rows(cache, layer)]


@pytest.mark.parametrize("config", [T1, WINDOWED], ids=["t1", "windowed"])
@pytest.mark.parametrize("method, tokens, match", [
    ("prefill", [[1, 2, 99]], "token 99 is not in the vocabulary, expected 0 to"),
    ("prefill", [[1, -1]], "token -1 is not in the vocabulary"),
    ("prefill", [[1.0, 2.0]], "tokens are float64 .*expected integers"),
    ("prefill", [[True]], "tokens are bool .*expected integers"),
    ("prefill", [["a"]], "expected integers"),
    ("prefill", [[]], "at least one"),
    ("prefill", [], "at least one"),
    ("prefill", [[[1]]], r"shape \(1, 1, 1\), expected integers of shape \(batch, n_new\)"),
    ("prefill", [[1, 2], [3]], "ragged"),
    ("prefill", [[1], [2]], "the cache is for a batch of 1, tokens are a batch of 2"),
    ("prefill", [[1] * 6], "holds 7 of capacity 12 positions, 6 more do not fit"),
    ("decode", [[1, 2]], r"decode: tokens are \(1, 2\), expected one a sequence"),
    ("decode", [99], "token 99 is not in the vocabulary"),
    ("decode", [1, 2], "tokens are a batch of 2"),
    ("decode", [1.5], "expected integers"),
    ("decode", [[1, 2], [3]], "ragged"),
    ("decode", [], "at least one"),
])
def test_a_refused_call_leaves_cache_and_ledger_as_they_were(config, method, tokens, match):
    model = Transformer.random(config, precision=FP32)
    cache = model.new_cache(capacity=12)
    model.prefill([[3, 1, 4, 1, 5, 9, 2]], cache)
    before = held(cache)
    with Ledger() as ledger, pytest.raises(InputError, match=match):
        getattr(model, method)(tokens, cache)
    assert held(cache) == before
    assert list(ledger.entries()) == []


@pytest.mark.parametrize("prompt, n_output, match", [
    ([[1, 2], [3]], 2, "ragged"), ([], 2, "at least one"), ([1, 2], 0, "n_output is 0"), ([1, 2], 1.5, r"n_output is 1\.5"),
    ([1, 99], 2, "token 99"), ([1, 2], 12, "do not fit"),
])
def test_generate_refuses_before_it_starts(prompt, n_output, match):
    model = Transformer.random(T1, precision=FP32)
    cache = model.new_cache(capacity=12)
    with pytest.raises(InputError, match=match):
        generate(model, prompt, n_output, cache=cache)
    assert cache.length == 0


def test_another_models_cache_is_refused():
    model = Transformer.random(T1, precision=FP32)
    others = [
        Transformer.random(WINDOWED, precision=FP32), Transformer.random(T1), Transformer.shape_only(T1, FP32),
        Transformer.random(ModelConfig(2, 16, 4, 24, 32, 2, 4, True, sliding_window=3), precision=FP32),
    ]
    for other in others:
        with pytest.raises(CacheError, match="another model"):
            model.prefill([1], other.new_cache())


@pytest.mark.parametrize("weights, kv", [("fp8", "fp16"), ("fp16", "fp8")])
def test_formats_without_values_are_shape_only(weights, kv):
    with pytest.raises(InputError, match="shape-only"):
        Transformer.random(T1, precision=Precision(weights=weights, kv=kv))
    with pytest.raises(InputError, match="shape-only"):
        Transformer.random(T1, precision=Precision(bits_per_weight=4.5))


class Interrupted(BaseException):
    """Like a KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("config", [T1, WINDOWED], ids=["t1", "windowed"])
@pytest.mark.parametrize("n_new", [1, 4])
@pytest.mark.parametrize("capacity", [None, 30])
def test_a_forward_that_fails_anywhere_leaves_no_trace(config, n_new, capacity, monkeypatch):
    """An exception at each operation in turn, then the same request again: as if nothing had happened."""
    monkeypatch.setattr(kvcache, "GROWTH_ROWS", 1)  # so that rows are also moved by the forward that fails
    fuse = [0]  # operations until the next failure; none of those at 0

    def with_fuse(operation):
        def failing(*operands):
            fuse[0] -= 1
            if fuse[0] == 0:
                raise Interrupted
            return operation(*operands)

        return failing

    model = Transformer.random(config, precision=FP32)
    for name in OPERATIONS:
        replace_operation(monkeypatch, model, name, with_fuse)
    tokens = some_tokens(config, 1, 11 + n_new)
    _, cache, _ = run(model, tokens, [4, 2], 5, cache=model.new_cache(capacity=capacity))
    before, expected = held(cache), model.prefill(tokens[:, 11:], cache.fork())
    n_operations = 1 + config.n_layers * 12 + 2
    for at in range(1, n_operations + 1):
        fuse[0] = at
        with pytest.raises(Interrupted):
            model.prefill(tokens[:, 11:], cache)
        assert held(cache) == before
        with Ledger() as ledger:
            close(model.prefill(tokens[:, 11:], cache.fork()), expected)
        assert {phase for (phase,) in ledger.by("phase")} == {"prefill"}  # the failed forward is over
    fuse[0] = n_operations + 1
    close(model.prefill(tokens[:, 11:], cache), expected)
    assert fuse[0] == 1
