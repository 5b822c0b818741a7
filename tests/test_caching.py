"""What a cache saves in closed form: equal to what the caches report, and true to the textbook's examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel
import npinfer
from costmodel import caching, formulas, gpu, predict
from npinfer import InputError, Ledger, Precision, PrefixCache, SessionCache, Transformer, UnknownName, preset
from npinfer.generate import no_tokens
from strategies import configs, precisions

MISTRAL, FP16 = preset("mistral-7b"), Precision()
RTX = gpu("rtx-4090")


def saved(saving):
    """Cold counts minus warm counts of a `prefix` or a turn."""
    return npinfer.Counts(**saving["cold"]) - npinfer.Counts(**saving["warm"])


@given(configs(), precisions(), st.integers(1, 40), st.data())
def test_a_prefix_saves_what_the_cache_reports(config, precision, n_prompt, data):
    n_prefix = data.draw(st.integers(1, n_prompt))
    cache = PrefixCache(Transformer.shape_only(config, precision))
    cache.add(no_tokens((n_prefix,)))
    start = cache.prefill(no_tokens((n_prompt,)))
    saving = caching.prefix_saving(config, precision, [RTX], n_prompt, n_prefix)
    assert saved(saving) == start.report.saved
    assert saving["n_computed"] == start.report.n_computed
    with Ledger() as ledger:
        npinfer.generate(Transformer.shape_only(config, precision), no_tokens((1, n_prompt)), 1)
    assert saving["cold"] == ledger.total()._asdict()


@given(configs(), precisions(), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_a_session_saves_what_the_cache_reports(config, precision, prompts):
    session = SessionCache(Transformer.shape_only(config, precision)).session("a")
    for turn, n_prompt in zip(caching.session_saving(config, precision, [RTX], prompts), prompts, strict=True):
        with session.prefill(no_tokens((n_prompt,))) as start:
            assert saved(turn) == start.report.saved
            assert (turn["n_reused"], turn["n_computed"]) == (start.report.n_reused, start.report.n_computed)


def test_textbook_section_12_1():
    """System prompt 1200, user 200: 1/7 by length, 0.1460 of the needed FLOPs: the user's part attends to the prefix."""
    saving = caching.prefix_saving(MISTRAL, FP16, [RTX], 1400, 1200)
    assert saving["n_computed"] == 200
    assert saving["textbook_share"] == 200 / 1400
    assert round(saving["needed_flops_share"], 4) == 0.1460
    # The time falls less than the FLOPs: one pass over the weights is the floor.
    times = saving["ttft_s"]["floor"]
    assert times["warm"] / times["cold"] > 0.1460 or times["warm"] == pytest.approx(0.1460 * times["cold"], rel=1e-3)


def test_textbook_section_13():
    """Prompts of 800 to 2800 tokens: each turn after the first computes 400, and attends to more."""
    turns = caching.session_saving(MISTRAL, FP16, [RTX], range(800, 2801, 400))
    assert [turn["n_computed"] for turn in turns] == [800, 400, 400, 400, 400, 400]
    flops = [turn["warm"]["matmul_flops"] for turn in turns[1:]]
    # 400 queries see 400 keys more in each turn: 4 * n_heads * head_dim FLOPs a pair and layer.
    assert set(np.diff(flops).tolist()) == {400 * 400 * 4 * 32 * 128 * 32}


def test_a_wholly_cached_prompt_costs_a_decode_step():
    warm = caching.cached_ttft_s(preset("llama-3-8b"), FP16, "h100-sxm", 1000, 999)["floor"]["warm"]
    assert warm == predict(preset("llama-3-8b"), FP16, "h100-sxm", 999, 2).floor.tpot_s
    assert round(1e3 * warm, 1) == 4.5


def test_host_memory_has_a_price():
    device, host = [caching.cached_ttft_s(MISTRAL, FP16, RTX, 1400, 1200, tier=tier)["floor"] for tier in ("device", "host")]
    assert host["cold"] == device["cold"]
    assert host["warm"] - device["warm"] == pytest.approx(1200 * 131_072 / 31.5e9, rel=1e-3)  # PCIe 4.0 x16
    window = preset("mistral-7b-v0.1")
    assert caching.transfer_s(window, FP16, RTX, 10_000, tier="host") == 4095 * 131_072 / RTX.host_link_bytes_per_s
    assert caching.transfer_s(window, FP16, RTX, 10_000) == 0
    unknown = caching.cached_ttft_s(MISTRAL, FP16, "h20-96gb", 1400, 1200, tier="host")["floor"]
    assert unknown["warm"] is None and unknown["cold"] is not None  # the profile has no host link


@pytest.mark.parametrize("name", ["rtx-4090", "h100-sxm", "t4", "l4"])
@pytest.mark.parametrize("level", ["floor", "roofline"])
@pytest.mark.parametrize("n_user", [1, 100, 2000])
def test_breakeven_is_the_first_prefix_that_pays(name, level, n_user):
    def gain_s(n_prefix):
        times = caching.cached_ttft_s(MISTRAL, FP16, name, n_prefix + n_user, n_prefix, tier="host")[level]
        return times["cold"] - times["warm"]

    n = costmodel.breakeven_prefix_tokens(MISTRAL, FP16, name, n_user, level)
    assert gain_s(n) > 0
    assert n == 1 or all(gain_s(shorter) <= 0 for shorter in {1, n // 2, n - 1})
    assert all(gain_s(longer) > 0 for longer in (n + 1, 2 * n, 10 * n))


def test_no_breakeven_without_a_rate():
    assert costmodel.breakeven_prefix_tokens(MISTRAL, FP16, "apple-m1-8-core-gpu", 100) is None
    assert costmodel.breakeven_prefix_tokens(MISTRAL, FP16, "apple-m1-8-core-gpu", 100, "expected") is None


@given(st.sampled_from(["rtx-4090", "h100-sxm", "gtx-1080-ti"]), st.integers(1, 3000), st.data())
def test_many_prompts_at_once_are_timed_like_one(name, n_prompt, data):
    n_cached = data.draw(st.integers(0, n_prompt - 1))
    times = caching.prefill_times_s(MISTRAL, FP16, name, np.array([n_prompt, 7]), np.array([n_cached, 0]))
    one = predict(MISTRAL, FP16, name, n_prompt, 1, n_cached=n_cached)
    if one.floor.ttft_s is None:
        assert times == {"floor": None, "roofline": None}
    else:
        assert times["floor"][0] == pytest.approx(one.floor.ttft_s, rel=1e-14)
        assert times["roofline"][0] == pytest.approx(one.roofline.ttft_s, rel=1e-14)


@pytest.mark.parametrize("call, match", [
    (lambda: caching.prefix_saving(MISTRAL, FP16, [RTX], 100, 101), "prefix tokens is 101, expected at most the prompt's 100"),
    (lambda: caching.session_saving(MISTRAL, FP16, [RTX], [800, 0]), "prompt of turn 2 is 0"),
    (lambda: costmodel.breakeven_prefix_tokens(MISTRAL, FP16, RTX, 0), "n_user is 0"),
    (lambda: caching.cached_ttft_s(MISTRAL, FP16, RTX, 10, 10), "n_cached is 10 of n_prompt 10"),
])
def test_what_cannot_be_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_unknown_tiers_and_levels_are_named():
    with pytest.raises(UnknownName, match="no tier 'disk'; known: device, host"):
        caching.transfer_s(MISTRAL, FP16, RTX, 10, tier="disk")
    with pytest.raises(UnknownName, match="no level 'best'"):
        costmodel.breakeven_prefix_tokens(MISTRAL, FP16, RTX, 10, "best")


def test_prefix_shares_are_of_the_counts():
    saving = caching.prefix_saving(MISTRAL, FP16, [RTX, gpu("h100-sxm")], 1000, 400, batch=3)
    cold, warm = [formulas.forward_counts(MISTRAL, FP16, 3, n, 1000 - n) for n in (0, 400)]
    assert saving["needed_flops_share"] == warm.needed_flops / cold.needed_flops
    assert list(saving["ttft_s_by_gpu"]) == ["rtx-4090", "h100-sxm"]
    assert saving["ttft_s"] == saving["ttft_s_by_gpu"]["rtx-4090"]
