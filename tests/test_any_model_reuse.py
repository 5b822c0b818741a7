"""The caches on models of all families: what is reused gives the logits of a run without them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npinfer import CacheError, DynamicScaling, Ledger, Precision, PrefixCache, PromptCache, SessionCache, Transformer
from strategies import FP32, any_config
from test_any_model import FAMILIES, LEARNED, close, every_family, lengths_matter

TOLERANCE = {"fp32": 1e-5, "int8": 0.05}  # an int8 code may be rounded the other way after another order of summation
ids = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def cold(model, tokens):
    return model.prefill(tokens, model.new_cache())


def reused(model, cache, tokens, kv="fp32"):
    """Tokens of a prompt that a cache served; the logits are those of a cold run, also those of a step after it."""
    with cache.prefill(tokens) as start:
        np.testing.assert_allclose(start.logits, cold(model, tokens), rtol=0, atol=TOLERANCE[kv])
        if len(tokens) < 20:
            step = model.decode([1], start.cache)
            np.testing.assert_allclose(step, cold(model, [*tokens, 1]), rtol=0, atol=TOLERANCE[kv])
        return start.report.n_reused


@every_family
@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_caches_give_the_logits_of_a_cold_run(config, kv):
    model = Transformer.random(config, precision=Precision("fp32", kv, "fp32"))
    system, first, second = [1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 0, 1]

    prefixes = PrefixCache(model)
    prefixes.add(system)
    assert [reused(model, prefixes, [*system, *tail], kv) for tail in (first, second, [])] == [7, 7, 6]

    prompts = PromptCache(model, block_size=2)
    assert [reused(model, prompts, [*system, *tail], kv) for tail in (first, second, [], [8, 3])] == [0, 6, 6, 8]

    session = SessionCache(model).session("one")
    history = [*system, *session.generate(system, 3).tokens.ravel().tolist()]
    assert reused(model, session, [*history, *second], kv) == 7 + 3 - 1  # the last one generated has no row


@every_family
def test_a_session_comes_back_from_a_file(config, tmp_path):
    model = Transformer.random(config, precision=FP32)
    sessions = SessionCache(model)
    with sessions.session("one").prefill([1, 2, 3, 4, 5, 6]):
        pass
    sessions.save(tmp_path / "file")
    again = SessionCache(model)
    again.load(tmp_path / "file")
    assert reused(model, again.session("one"), [1, 2, 3, 4, 5, 6, 7, 8]) == 6


@settings(max_examples=30)
@given(any_config().filter(lambda config: not lengths_matter(config)), ids, st.lists(ids, min_size=1, max_size=3))
def test_a_prompt_cache_gives_the_logits_of_a_cold_run(config, system, tails):
    model = Transformer.random(config, precision=FP32)
    prompts = PromptCache(model, block_size=2)
    for number, tail in enumerate(tails):
        prompt = [token % config.vocab_size for token in [*system, *tail]]
        with prompts.prefill(prompt) as start:
            close(start.logits, cold(model, prompt))
        assert number == 0 or start.report.n_reused >= min(len(system), len(prompt) - 1) // 2 * 2


@every_family
def test_a_start_holds_the_bytes_of_its_rows(config):
    """Numeric or not, they are the same, and so is what loading them moves."""
    for model in (Transformer.random(config, precision=FP32), Transformer.shape_only(config, FP32)):
        prompts = PromptCache(model, block_size=2)
        prompts.prefill([1, 2, 3, 4, 5, 6]).release()
        with Ledger() as ledger, prompts.prefill([1, 2, 3, 4, 5, 6, 7]) as start:
            pass
        n_parts, n_heads, width = config.kv_shape
        row = n_parts * n_heads * width * 4
        n_rows = sum([6 if window is None else min(6, window - 1) for window in config.windows])
        assert ledger.total(op="cache_load").kv_bytes_read == start.report.bytes_loaded == n_rows * row
        assert prompts.nbytes == 6 * config.n_layers * row
        assert start.cache.nbytes == row * sum([7 if window is None else min(7, window - 1) for window in config.windows])


def test_positions_beyond_those_learned_are_refused_and_nothing_is_kept():
    model = Transformer.random(LEARNED, precision=FP32)
    prompts, long = PromptCache(model, block_size=2), [1] * 31
    for call in (prompts.prefill, SessionCache(model).session("one").prefill):
        with pytest.raises(CacheError, match="positions up to 31"):
            call(long)
    with pytest.raises(CacheError, match="at most the model's context of 30"):
        PrefixCache(model).add(long)
    assert prompts.nbytes == 0


@pytest.mark.parametrize("config", [FAMILIES[0], FAMILIES[2]], ids=["latent", "capped"])
def test_under_dynamic_scaling_prompts_up_to_the_trained_length_are_reused_and_longer_ones_refused(config):
    """Beyond it a key depends on how long the text is, so that another text's key is not the one that a cold run makes."""
    model = Transformer.random(replace(config, rope_scaling=DynamicScaling(4.0, 9)), precision=FP32)
    prompts, session, prefixes = PromptCache(model, block_size=2), SessionCache(model).session("one"), PrefixCache(model)
    prefixes.add([1, 2, 3, 4])
    for cache in (prompts, session, prefixes):
        cache.prefill([1, 2, 3, 4, 5]).release()
        with cache.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9]) as start:
            np.testing.assert_allclose(start.logits, cold(model, [1, 2, 3, 4, 5, 6, 7, 8, 9]), rtol=0, atol=1e-5)
            assert start.report.n_reused >= 4
        with pytest.raises(CacheError, match="the prompt has 10 tokens, and beyond 9 a key depends on how long the text is"):
            cache.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
