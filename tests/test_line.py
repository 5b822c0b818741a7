"""The line and its bends against scans and arithmetic; generation without a cache against runs of it."""

from dataclasses import replace
from math import fsum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import formulas, line, predict
from costmodel.recompute import (
    generate_without_cache,
    recompute_doubling_ratio,
    recompute_needed_flops,
    recompute_quadratic_n_output,
)
from costmodel.search import first_where
from npinfer import InputError, Ledger, Precision, Transformer, UnknownName, generate, preset
from strategies import FP32, T1, any_configs, batches, configs, some_tokens

MISTRAL, FP16, RTX = preset("mistral-7b"), Precision(), "rtx-4090"
WINDOW = preset("mistral-7b-v0.1")  # the same shape, window 4096
WITHOUT_RATE = "apple-m1-8-core-gpu-8gb"


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 300))
def test_the_first_that_holds(threshold, limit, start):
    asked = []

    def holds(n):
        asked.append(n)
        return n >= threshold

    limit = max(limit, start)
    scanned = next((n for n in range(start, limit + 1) if n >= threshold), None)
    assert first_where(holds, start, limit) == scanned
    assert len(asked) <= 20
    assert all(start <= n <= limit for n in asked)


# ---- without a cache


@given(configs() | any_configs(), batches, st.integers(1, 6), st.integers(1, 6))
def test_flops_without_a_cache_are_those_of_a_run(config, batch, n_prompt, n_output):
    with Ledger() as ledger:
        generate_without_cache(Transformer.shape_only(config), some_tokens(config, batch, n_prompt), n_output)
    assert ledger.forwards == ["prefill"] * n_output
    assert recompute_needed_flops(config, n_prompt, n_output, batch) == ledger.total().needed_flops


@given(configs(), batches, st.integers(1, 5), st.integers(1, 6))
def test_tokens_are_the_same_with_and_without(config, batch, n_prompt, n_output):
    model = Transformer.random(config, precision=FP32)
    tokens = some_tokens(config, batch, n_prompt)
    with_cache, without = generate(model, tokens, n_output).tokens, generate_without_cache(model, tokens, n_output)
    # Two orders of summation may part where two logits are all but equal: such a choice is none.
    with_logits = model.prefill(np.concatenate([tokens, without[:, :-1]], axis=1), model.new_cache(batch), all_logits=True)
    best = np.sort(with_logits[:, n_prompt - 1 :], axis=-1)[..., -2:]
    clear = (best[..., 1] - best[..., 0] > 1e-4).all(axis=1)
    assert (with_cache == without)[clear].all()
    assert without.shape == (batch, n_output)


def test_flops_without_a_cache_by_hand():
    # T1, prompt 2, 3 tokens: 2 + 3 + 4 positions of 2 layers * 3,840, heads 3 * 1,024, 128 a pair of 3 + 6 + 10.
    assert recompute_needed_flops(T1, 2, 3) == 9 * 7680 + 3 * 1024 + 19 * 128


def test_doubling_goes_from_the_line_to_the_square_and_on():
    ratios = [recompute_doubling_ratio(MISTRAL, 1000, n) for n in (1, 100, 2000, 10**4, 10**7)]
    assert ratios == sorted(ratios)
    assert 2 < ratios[0] < 2.01 and 7.9 < ratios[-1] < 8  # attention alone: the cube
    assert 3.99 < recompute_doubling_ratio(WINDOW, 1000, 10**6) < 4.01  # a window caps it
    n = recompute_quadratic_n_output(MISTRAL, 1000)
    assert recompute_doubling_ratio(MISTRAL, 1000, n - 1) < 3 <= recompute_doubling_ratio(MISTRAL, 1000, n)


@pytest.mark.parametrize("call, match", [
    (lambda: recompute_needed_flops(T1, 0, 3), "n_prompt is 0"),
    (lambda: recompute_needed_flops(T1, 3, 0), "n_output is 0"),
    (lambda: generate_without_cache(Transformer.shape_only(T1), [1], 0), "n_output is 0"),
])  # fmt: skip
def test_generation_of_nothing_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


# ---- the line


@pytest.mark.parametrize("level", line.LEVELS)
def test_a_sweep_is_the_sum_of_its_steps(level):
    lengths = [1, 2, 5, 9]
    first = line.prefill_s(MISTRAL, FP16, RTX, 50, level)
    latencies = [fsum([first, *[line.step_s(MISTRAL, FP16, RTX, 50 + i, level) for i in range(1, n)]]) for n in lengths]
    fit = line.latency_line(MISTRAL, FP16, RTX, 50, lengths, level)
    k, b = np.polyfit(lengths, latencies, 1)
    assert (fit.b_s, fit.k_s) == (pytest.approx(b, rel=1e-9), pytest.approx(k, rel=1e-9))
    assert fit.bend == pytest.approx(line.step_s(MISTRAL, FP16, RTX, 58, level) / line.step_s(MISTRAL, FP16, RTX, 51,
        level) - 1)
    assert 0.999 < fit.r2 < 1


def test_a_window_does_not_bend():
    fit = line.latency_line(WINDOW, FP16, RTX, 5000, [10, 100, 1000])
    assert fit.bend == 0
    assert fit.b_s == pytest.approx(line.prefill_s(WINDOW, FP16, RTX, 5000) - fit.k_s)  # the first token is the prefill's
    assert line.bend_n_context(WINDOW, FP16, RTX, 5000) is None


@pytest.mark.parametrize("level", line.LEVELS)
@pytest.mark.parametrize("batch", [1, 8])
def test_each_length_is_the_first(level, batch):
    n = line.bend_n_context(MISTRAL, FP16, RTX, 1000, 0.1, level, batch)
    before, at, first = [line.step_s(MISTRAL, FP16, RTX, m, level, batch) for m in (n - 1, n, 1001)]
    assert before < 1.1 * first <= at
    n = line.breakeven_n_prompt(MISTRAL, FP16, RTX, 10, level, batch)
    before, at = [getattr(predict(MISTRAL, FP16, RTX, m, 2, batch), level) for m in (n - 1, n)]
    assert before.ttft_s <= 10 * before.tpot_s and at.ttft_s > 10 * at.tpot_s
    assert formulas.breakeven_n_output(at.ttft_s, at.tpot_s) > 10
    n = line.compute_bound_n_prompt(MISTRAL, FP16, RTX, batch)
    assert [predict(MISTRAL, FP16, RTX, m, 1, batch).floor.prefill_bound for m in (n - 1, n)] == ["bandwidth", "compute"]


def test_lengths_by_hand():
    # 0.1 * (14,221,320,192 + 8,192 + 131,072 + 1001 * 131,072) / 131,072 = 10,950.2 tokens more than 1001
    assert line.bend_n_context(MISTRAL, FP16, RTX, 1000) == 11_952
    # pairs: (n + 1) / 2 * 4 * 32 layers * 4096 >= 0.1 * 2 * 6,979,321,856
    assert line.attention_n_prompt(MISTRAL) == 5324  # 5323.8 - 1, rounded up
    # 14,221,320,192 / 131,072 = 108,500.06; batch 4 reads four times the KV
    assert line.kv_equals_weights_n_context(MISTRAL, FP16) == 108_501
    assert line.kv_equals_weights_n_context(MISTRAL, FP16, batch=4) == 27_126
    assert line.kv_equals_weights_n_context(WINDOW, FP16) is None
    assert line.attention_n_prompt(WINDOW, 0.1) == 5850  # 4096 * (n - 2047.5) / n reaches 2662.4 keys
    assert line.attention_n_prompt(WINDOW, 0.16) is None


@given(configs() | any_configs(), batches, st.integers(1, 12))
def test_prefill_flops_by_part(config, batch, n_prompt):
    flops = line.prefill_flops(config, n_prompt, batch)
    assert sum(flops) == formulas.forward_counts(config, FP16, batch, 0, n_prompt).needed_flops
    assert flops.head == 2 * batch * config.d_model * config.vocab_size
    assert flops.projections == n_prompt * batch * line.prefill_flops(config, 1).projections


@given(configs(), batches, st.integers(1, 12), st.booleans())
def test_the_gap_of_the_rough_flops_is_the_sum_of_its_parts(config, batch, n_prompt, all_parameters):
    config = replace(config, qkv_bias=False, o_bias=False, mlp_bias=False)
    n_params = formulas.n_parameters(config) if all_parameters else None
    gap = line.rough_prefill_gap(config, n_prompt, batch, n_params)
    assert gap.difference == gap.exact - gap.rough == sum(gap[3:])
    assert gap.head == -2 * batch * (n_prompt - 1) * config.d_model * config.vocab_size
    assert gap.vectors == -2 * batch * n_prompt * (2 * config.n_layers + 1) * config.d_model
    table = all_parameters and not config.tie_embeddings
    assert gap.embedding == -2 * batch * n_prompt * table * config.d_model * config.vocab_size


@given(any_configs(), batches, st.integers(1, 12))
def test_the_gap_leaves_out_experts_that_a_token_does_not_use(config, batch, n_prompt):
    gap = line.rough_prefill_gap(config, n_prompt, batch)
    assert gap.difference == gap.exact - gap.rough == sum(gap[3:])
    assert gap.exact == formulas.forward_counts(config, FP16, batch, 0, n_prompt).needed_flops
    each_norm = config.d_model * (1 + (config.norm == "layer"))
    assert gap.vectors <= -2 * batch * n_prompt * each_norm and gap.embedding == 0


def test_parameters_of_a_token():
    # Of Mixtral's 46,702,792,704, 32 layers have 6 of 8 experts idle, three matrices of 14,336 x 4,096 each, and the
    # embedding is looked up.
    idle = 32 * 6 * 3 * 14_336 * 4_096
    assert formulas.n_token_parameters(preset("mixtral-8x7b-v0.1")) == 46_702_792_704 - idle - 32_000 * 4_096
    assert formulas.n_token_parameters(MISTRAL) == 7_110_660_096


def test_without_a_rate_only_what_needs_none_is_known():
    assert line.prefill_s(MISTRAL, FP16, WITHOUT_RATE, 10) is None
    assert line.latency_line(MISTRAL, FP16, WITHOUT_RATE, 10, [1, 2]) is None
    assert line.breakeven_n_prompt(MISTRAL, FP16, WITHOUT_RATE) is None
    assert line.compute_bound_n_prompt(MISTRAL, FP16, WITHOUT_RATE) is None
    assert line.bend_n_context(MISTRAL, FP16, WITHOUT_RATE, 1000) == 11_952  # a ratio of bytes, whatever the bandwidth


@pytest.mark.parametrize("call, match", [
    (lambda: line.latency_line(MISTRAL, FP16, RTX, 100, [50]), "a line through 1 points needs two different"),
    (lambda: line.latency_line(MISTRAL, FP16, RTX, 100, []), "a line through 0 points needs two different"),
    (lambda: line.latency_line(MISTRAL, FP16, RTX, 100, [0, 50]), "n_output is 0, expected at least 1"),
    (lambda: line.latency_line(MISTRAL, FP16, RTX, 0, [1, 50]), "n_prompt is 0, expected at least 1"),
    (lambda: line.step_s(MISTRAL, FP16, RTX, 1), "n_context is 1, expected at least 2"),
    (lambda: line.bend_n_context(MISTRAL, FP16, RTX, 1000, -0.1), "excess is -0.1, expected a positive number"),
    (lambda: line.breakeven_n_prompt(MISTRAL, FP16, RTX, 0), "n_output is 0, expected a positive number"),
    (lambda: line.attention_n_prompt(MISTRAL, float("nan")), "excess is nan"),
    (lambda: line.rough_prefill_gap(MISTRAL, 0), "n_prompt is 0"),
])  # fmt: skip
def test_what_cannot_be_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_unknown_levels_are_named():
    with pytest.raises(UnknownName, match="no level 'best'; known: floor, roofline"):
        line.prefill_s(MISTRAL, FP16, RTX, 10, "best")
