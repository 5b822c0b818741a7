"""From counts to seconds: figures worked by hand, what bounds what, and what a missing rate leaves unknown."""

import doctest
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import costmodel
import npinfer
from costmodel import GPU, formulas, gpu, gpus, predict, predict_from
from npinfer import InputError, Ledger, ModelConfig, Precision, Transformer, UnknownName, preset
from strategies import T1, batches, configs, precisions, some_tokens

MISTRAL, LLAMA3 = preset("mistral-7b"), preset("llama-3-8b")
FP16 = Precision()
ALL_GPUS = [gpu(name) for name in gpus()]
WITHOUT_FP16 = [profile for profile in ALL_GPUS if "fp16" not in profile.matmul_flops_per_s]
TOY = GPU("toy", memory_bytes=10**6, memory_bytes_per_s=1e9, matmul_flops_per_s={"fp16": 1e12}, vector_flops_per_s=1e11)
# Devices that are bound by everything in turn: the shipped ones, and some with rates unlike any.
devices = st.sampled_from(ALL_GPUS) | st.builds(
    GPU,
    name=st.just("any"),
    memory_bytes=st.integers(10**3, 10**6),
    memory_bytes_per_s=st.floats(1e6, 1e15),
    matmul_flops_per_s=st.fixed_dictionaries({}, optional={
        name: st.floats(1e6, 1e18) for name in ("fp32", "fp16", "bf16", "fp8")
    }),
    vector_flops_per_s=st.none() | st.floats(1e6, 1e18),
    last_level_cache_bytes=st.none() | st.integers(1, 10**6),
)
prompts, outputs = st.integers(1, 12), st.integers(1, 8)
SMALL = settings(max_examples=50)
LEVELS = ("floor", "roofline")
# Where two divisions may round to either side of one.
ABOUT = 1 - 1e-12


def milliseconds(seconds):
    """As it is printed."""
    return round(seconds * 1e3, 2)


# ---- figures


def test_mistral_7b_on_an_rtx_4090():
    prediction = predict(MISTRAL, FP16, "rtx-4090", n_prompt=1000, n_output=100)
    floor, roofline = prediction.floor, prediction.roofline
    # (14,483,193,856,000 - 261,881,856,000 masked) / 165.2e12
    assert floor.ttft_s == 14_221_312_000_000 / 165.2e12
    # Each step: weights, one embedding row, one row of KV written, 1000 + i rows read, 1,050 of them in the mean.
    assert floor.tpot_s == pytest.approx((14_221_320_192 + 8192 + 131_072 + 1050 * 131_072) / 1008e9, rel=1e-12)
    assert (milliseconds(floor.ttft_s), milliseconds(floor.tpot_s)) == (86.09, 14.25)
    assert (floor.prefill_bound, floor.decode_bound) == ("compute", "bandwidth")
    assert floor.latency_s == floor.ttft_s + 100 * floor.tpot_s
    assert floor.latency_exact_s == pytest.approx(floor.ttft_s + 99 * floor.tpot_s, rel=1e-12)
    assert floor.tokens_per_s == 100 / floor.latency_s
    assert (roofline.prefill_bound, roofline.decode_bound) == ("compute", "bandwidth")
    assert prediction.ridge == 165.2e12 / 1008e9
    assert prediction.prefill.intensity == 14_221_312_000_000 / (14_221_320_192 + 1000 * 8192 + 2 * 131_072_000)
    assert prediction.decode.intensity < 1.1
    assert prediction.fits
    assert prediction.memory_bytes_needed == 2 * 7_241_732_096 + 1099 * 131_072
    assert prediction.max_context == (24_000_000_000 - 2 * 7_241_732_096) // 131_072
    assert prediction.floor_applies
    assert prediction.missing == ()
    assert prediction.expected.ttft_s > prediction.roofline.ttft_s
    assert prediction.compute == "fp16"


@pytest.mark.parametrize("name, ttft_ms, tpot_ms", [("a100-sxm-80gb", 45.58, 7.43), ("h100-sxm", 14.37, 4.52)])
def test_llama_3_8b(name, ttft_ms, tpot_ms):
    floor = predict(LLAMA3, FP16, name, n_prompt=1000, n_output=100).floor
    assert (milliseconds(floor.ttft_s), milliseconds(floor.tpot_s)) == (ttft_ms, tpot_ms)


def test_rough_estimates_by_hand():
    rough = predict(MISTRAL, FP16, "rtx-4090", n_prompt=1000, n_output=100).rough
    assert rough.eta == 0.6
    assert rough.n_params == 7_110_660_096
    assert rough.prefill_flops == 2 * 1000 * 7_110_660_096
    assert rough.decode_flops == 2 * 100 * 7_110_660_096
    assert rough.ttft_s == pytest.approx(14_221_320_192_000 / 99.12e12)  # 0.6 * 165.2e12
    assert rough.tpot_compute_s == pytest.approx(14_221_320_192 / 99.12e12)
    assert rough.tpot_bandwidth_s == 14_221_320_192 / 1008e9
    assert rough.tpot_s == rough.tpot_bandwidth_s
    assert milliseconds(rough.tpot_bandwidth_s) == 14.11
    assert rough.prefill_flops_error == pytest.approx(14_221_320_192_000 / 14_221_312_000_000 - 1)
    # 99 steps of the matrices (the 65 gains of 4,096 multiply no matrix), and 524,288 FLOPs for each of 103,950 keys.
    exact = 99 * 2 * (7_110_660_096 - 65 * 4096) + 524_288 * 103_950
    assert rough.decode_flops_error == pytest.approx(1_422_132_019_200 / exact - 1)
    assert round(100 * rough.decode_flops_error, 2) == -2.75


def test_rough_tpot_is_the_larger_one():
    rough = predict(MISTRAL, FP16, "rtx-4090", batch=1000).rough
    assert rough.tpot_s == rough.tpot_compute_s > rough.tpot_bandwidth_s


def test_half_the_bits_are_half_the_floor():
    sixteen, eight = [predict(MISTRAL, Precision(weights=name), "rtx-4090").rough.tpot_bandwidth_s for name in ("fp16", "fp8")]
    assert milliseconds(eight) == 7.05
    assert eight == pytest.approx(sixteen / 2, rel=1e-4)


def test_the_compute_format_chooses_the_rate():
    def ttft_s(**options):
        return predict(MISTRAL, Precision(activations="fp8"), "rtx-4090", **options).floor.ttft_s

    rates = gpu("rtx-4090").matmul_flops_per_s
    for name in ("fp16", "fp16-fp16acc", "bf16", "int8"):
        assert ttft_s(compute=name) == 14_221_312_000_000 / rates[name]
    assert ttft_s() == ttft_s(compute="fp8")  # that of the activations
    assert predict(MISTRAL, FP16, "rtx-4090", compute="fp16-fp16acc").compute == "fp16-fp16acc"


def test_a_gpu_by_name_path_or_profile(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("memory_bytes = 24e9\nmemory_bytes_per_s = 1008e9\nmatmul_flops_per_s = { fp16 = 165.2e12 }\n")
    by_name = predict(MISTRAL, FP16, "rtx-4090")
    assert predict(MISTRAL, FP16, gpu("rtx-4090")) == by_name
    assert predict(MISTRAL, FP16, path).floor == predict(MISTRAL, FP16, str(path)).floor == by_name.floor


# ---- properties of the levels


@given(configs(), precisions(), devices, prompts, outputs, batches, st.data())
def test_bounds_of_every_level(config, precision, device, n_prompt, n_output, batch, data):
    n_cached = data.draw(st.integers(0, n_prompt - 1))
    prediction = predict(config, precision, device, n_prompt, n_output, batch, n_cached)
    floor, roofline, bandwidth = prediction.floor, prediction.roofline, device.memory_bytes_per_s
    weights_s = formulas.weight_bytes(config, precision, streamed=True) / bandwidth
    assert (floor.ttft_s is None) == (roofline.ttft_s is None) == (prediction.compute not in device.matmul_flops_per_s)
    if floor.ttft_s is not None:
        # However much is cached, the last token streams all weights, and its KV.
        kv = formulas.forward_counts(config, precision, batch, n_cached, n_prompt - n_cached).kv_bytes
        assert 0 < weights_s * ABOUT <= (weights_s + kv / bandwidth) * ABOUT <= floor.ttft_s <= roofline.ttft_s
    assert (floor.tpot_s is None) == (roofline.tpot_s is None) == (n_output == 1)
    if n_output > 1:
        kv = formulas.decode_counts_total(config, precision, batch, n_prompt, n_output).kv_bytes / (n_output - 1)
        assert (weights_s + kv / bandwidth) * ABOUT <= floor.tpot_s <= roofline.tpot_s


@given(configs(), precisions(), devices, prompts, outputs, batches, st.data())
def test_the_floor_by_its_definition(config, precision, device, n_prompt, n_output, batch, data):
    n_cached = data.draw(st.integers(0, n_prompt - 1))
    prediction = predict(config, precision, device, n_prompt, n_output, batch, n_cached)
    peak, ridge = device.matmul_flops_per_s.get(prediction.compute), prediction.ridge
    counts = {"prefill": formulas.forward_counts(config, precision, batch, n_cached, n_prompt - n_cached)}
    if n_output > 1:
        counts["decode"] = formulas.decode_counts_total(config, precision, batch, n_prompt, n_output)
    times = {"prefill": prediction.floor.ttft_s, "decode": prediction.floor.tpot_s}
    for name, total in counts.items():
        needed_flops = total.matmul_flops - total.masked_flops
        streamed_bytes = total.weight_bytes_read + total.kv_bytes_read + total.kv_bytes_written
        n_forwards = n_output - 1 if name == "decode" else 1
        phase, bound = getattr(prediction, name), getattr(prediction.floor, f"{name}_bound")
        assert (phase.needed_flops, phase.streamed_bytes) == (needed_flops, streamed_bytes)
        assert phase.intensity == needed_flops / streamed_bytes
        if peak is not None:
            assert times[name] == max(needed_flops / peak, streamed_bytes / device.memory_bytes_per_s) / n_forwards
            assert bound == ("compute" if needed_flops / peak > streamed_bytes / device.memory_bytes_per_s else "bandwidth")
            if abs(phase.intensity / ridge - 1) > 1e-9:
                assert bound == ("compute" if phase.intensity > ridge else "bandwidth")


@SMALL
@given(configs(), precisions(), devices, prompts, outputs, batches)
def test_the_roofline_by_its_definition(config, precision, device, n_prompt, n_output, batch):
    """Operation by operation, from the ledger of a run."""
    prediction = predict(config, precision, device, n_prompt, n_output, batch)
    peak = device.matmul_flops_per_s.get(prediction.compute)
    with Ledger() as ledger:
        npinfer.generate(Transformer.shape_only(config, precision), some_tokens(config, batch, n_prompt), n_output)
    seconds = {"prefill": 0.0, "decode": 0.0}
    for (phase, _), (_, counts) in ledger.by("phase", "op").items():
        moved = sum(getattr(counts, field) for field in counts._fields if "bytes" in field and "score" not in field)
        terms = [moved / device.memory_bytes_per_s]
        terms += [(counts.matmul_flops - counts.masked_flops) / peak] if peak else []
        terms += [counts.elementwise_flops / device.vector_flops_per_s] if device.vector_flops_per_s else []
        seconds[phase] += max(terms)
    if peak:
        assert prediction.roofline.ttft_s == pytest.approx(seconds["prefill"])
    if n_output > 1:
        assert prediction.roofline.tpot_s == pytest.approx(seconds["decode"] / (n_output - 1))


def floors(config, precision, device, n_prompt, n_output, batch, compute="fp16", n_cached=0):
    """Floor times of the phases, 0 where a rate is missing or there is no step."""
    floor = predict(config, precision, device, n_prompt, n_output, batch, n_cached, compute=compute).floor
    return np.array([floor.ttft_s or 0.0, floor.tpot_s or 0.0])


@given(configs(), precisions(), devices, prompts, outputs, batches)
def test_the_floor_does_not_fall_with_context_or_batch(config, precision, device, n_prompt, n_output, batch):
    base = floors(config, precision, device, n_prompt, n_output, batch)
    assert (base <= floors(config, precision, device, n_prompt + 1, n_output, batch)).all()
    assert (base <= floors(config, precision, device, n_prompt, n_output, batch + 1)).all()
    # More steps are later steps: their mean does not fall, but its last digit may.
    assert (base * ABOUT <= floors(config, precision, device, n_prompt, n_output + 1, batch)).all()


@given(configs(), precisions(), devices, prompts, outputs, batches)
def test_the_floor_does_not_fall_with_bits(config, precision, device, n_prompt, n_output, batch):
    def rising(precisions):
        times = [floors(config, precision, device, n_prompt, n_output, batch) for precision in precisions]
        assert all((fewer <= more).all() for fewer, more in zip(times, times[1:]))

    rising([replace(precision, weights=name, bits_per_weight=None) for name in ("fp8", "fp16", "fp32")])
    rising([replace(precision, bits_per_weight=bits) for bits in (0.5, 4, 4.83, 16)])
    rising([replace(precision, kv=name) for name in ("fp8", "int8", "fp16", "fp32")])


@given(configs(), precisions(), devices, st.integers(2, 12), batches)
def test_a_prompt_that_is_all_cached_takes_one_decode_step(config, precision, device, n_prompt, batch):
    warm = predict(config, precision, device, n_prompt, 1, batch, n_cached=n_prompt - 1)
    step = predict(config, precision, device, n_prompt - 1, 2, batch)
    for level in LEVELS:
        if getattr(warm, level).ttft_s is not None:
            assert getattr(warm, level).ttft_s == getattr(step, level).tpot_s


def test_caching_most_of_a_prompt_ends_at_the_bandwidth():
    cold, half, warm = [predict(MISTRAL, FP16, "rtx-4090", n_cached=n).floor for n in (0, 500, 999)]
    assert cold.ttft_s > half.ttft_s > warm.ttft_s > 14_221_320_192 / 1008e9
    assert (cold.prefill_bound, warm.prefill_bound) == ("compute", "bandwidth")
    assert cold.tpot_s == half.tpot_s == warm.tpot_s


# ---- a run gives the same


def all_of(prediction):
    """Every field, the costs of the operations as a set: a run has them in its own order."""
    fields = {name: getattr(prediction, name) for name in prediction._fields}
    for name in ("prefill", "decode"):
        phase = fields[name]
        fields[name] = sorted(tuple(cost) for cost in phase.costs), phase.n_forwards, phase.intensity
    return fields | {"max_context": prediction.max_context}


@given(configs(), precisions(), devices, prompts, outputs, batches, st.none() | st.sampled_from(["fp16", "fp8", "int8"]))
@example(MISTRAL, FP16, gpu("rtx-4090"), 1000, 100, 1, None)
def test_a_shape_only_run_predicts_the_same(config, precision, device, n_prompt, n_output, batch, compute):
    request = {"config": config, "precision": precision, "n_prompt": n_prompt, "n_output": n_output, "batch": batch}
    with Ledger() as ledger:
        npinfer.generate(Transformer.shape_only(config, precision), np.zeros((batch, n_prompt), int), n_output)
    run = predict_from(ledger, device, **request, compute=compute)
    assert all_of(run) == all_of(predict(gpu=device, **request, compute=compute))


@SMALL
@given(configs(), precisions(numeric=True), devices, prompts, outputs, batches)
def test_a_numeric_run_predicts_the_same(config, precision, device, n_prompt, n_output, batch):
    request = {"config": config, "precision": precision, "n_prompt": n_prompt, "n_output": n_output, "batch": batch}
    model = Transformer.random(config, precision=precision)
    with Ledger() as ledger:
        result = npinfer.generate(model, some_tokens(config, batch, n_prompt), n_output)
    run = predict_from(ledger, device, **request)
    assert all_of(run) == all_of(predict(gpu=device, **request))
    assert run.memory_bytes_needed == formulas.weight_bytes(config, precision) + result.cache.nbytes


# ---- what is not known


def test_one_output_token_has_no_tpot():
    prediction = predict(MISTRAL, FP16, "rtx-4090", n_output=1)
    for level in LEVELS:
        times = getattr(prediction, level)
        assert times.tpot_s is times.latency_s is times.tokens_per_s is times.decode_bound is None
        assert times.latency_exact_s == times.ttft_s
        assert times.ttft_s == getattr(predict(MISTRAL, FP16, "rtx-4090"), level).ttft_s
    assert prediction.decode.intensity is None
    assert prediction.rough.decode_flops_error is None
    assert prediction.memory_bytes_needed == 2 * 7_241_732_096 + 1000 * 131_072


def test_the_devices_without_fp16_are_known():
    names = {profile.name for profile in WITHOUT_FP16}
    assert "dgx-spark-gb10" in names
    assert {name for name in gpus() if name.startswith("apple-")} <= names


@pytest.mark.parametrize("device", WITHOUT_FP16, ids=lambda device: device.name)
def test_without_a_matmul_rate_only_decode_is_predicted(device):
    prediction = predict(MISTRAL, FP16, device)
    assert "matmul_flops_per_s.fp16" in prediction.missing
    bandwidth_s = prediction.decode.streamed_bytes / device.memory_bytes_per_s / 99
    assert prediction.floor.tpot_s == bandwidth_s <= prediction.roofline.tpot_s
    assert prediction.floor.decode_bound == "bandwidth"
    for level in (prediction.floor, prediction.roofline):
        assert level.ttft_s is level.latency_s is level.latency_exact_s is level.tokens_per_s is level.prefill_bound is None
    rough = prediction.rough
    assert rough.ttft_s is rough.tpot_compute_s is prediction.ridge is None
    assert rough.tpot_s == rough.tpot_bandwidth_s == 14_221_320_192 / device.memory_bytes_per_s
    assert predict(MISTRAL, FP16, device, n_output=1).floor.latency_exact_s is None


def test_a_rate_that_is_there_under_another_name_is_not_borrowed():
    device = replace(TOY, matmul_flops_per_s={"fp16-fp16acc": 2e12, "bf16": 1e12})
    assert predict(T1, FP16, device).floor.ttft_s is None
    assert predict(T1, FP16, device, compute="bf16").floor.ttft_s is not None
    assert predict(T1, Precision(activations="bf16"), device).floor.ttft_s is not None


def test_without_a_vector_rate_its_term_is_left_out():
    device = replace(TOY, vector_flops_per_s=None)
    lacking, fast = predict(T1, FP16, device), predict(T1, FP16, replace(TOY, vector_flops_per_s=1e30))
    assert lacking.missing == ("vector_flops_per_s",)
    assert (lacking.floor, lacking.roofline) == (fast.floor, fast.roofline)
    slow = predict(T1, FP16, replace(TOY, vector_flops_per_s=1e6))
    assert slow.floor == fast.floor
    assert slow.roofline.ttft_s > fast.roofline.ttft_s
    assert slow.roofline.prefill_bound == "compute"


def test_a_device_of_which_little_is_known():
    prediction = predict(T1, FP16, GPU("bare", memory_bytes=10**6, memory_bytes_per_s=1e9))
    assert prediction.missing == ("matmul_flops_per_s.fp16", "vector_flops_per_s")
    assert prediction.floor_applies is None
    assert prediction.floor.tpot_s > 0


# ---- memory, and the cache that a small model stays in


@given(configs(), precisions(), st.integers(1, 40), st.integers(1, 10), batches, st.integers(-5, 2000))
def test_the_longest_context_is_the_last_that_fits(config, precision, n_prompt, n_output, batch, room):
    weights = formulas.weight_bytes(config, precision)
    prediction = predict(config, precision, replace(TOY, memory_bytes=max(1, weights + room)), n_prompt, n_output, batch)

    def fits(n_context):
        return weights + formulas.kv_bytes_held(config, precision, n_context, batch) <= prediction.gpu.memory_bytes

    longest = prediction.max_context
    if longest is None:
        assert config.sliding_window is not None
        assert fits(config.sliding_window) and fits(10**9)
    else:
        assert longest == 0 or fits(longest)
        assert not fits(longest + 1)
    assert prediction.fits == (longest is None or n_prompt + n_output - 1 <= longest)
    assert prediction.fits == (prediction.memory_bytes_needed <= prediction.gpu.memory_bytes)


def test_weights_that_do_not_fit_leave_no_context():
    prediction = predict(preset("llama-2-70b"), FP16, "rtx-4090")
    assert not prediction.fits
    assert prediction.max_context == 0
    assert prediction.memory_bytes_needed > 130e9


def test_the_floor_does_not_apply_to_what_the_cache_holds():
    assert predict(T1, FP16, "rtx-4090").floor_applies is False
    streamed = predict(T1, FP16, TOY).decode.streamed_bytes / 99  # weights, and the KV of a long context too
    assert streamed > formulas.weight_bytes(T1, FP16, streamed=True)
    for cache, applies in [(streamed / 4 - 1, True), (streamed / 4, False), (streamed, False)]:
        assert predict(T1, FP16, replace(TOY, last_level_cache_bytes=cache)).floor_applies is applies


# ---- what is refused


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"n_prompt": 0}, "n_prompt is 0, expected at least 1"),
        ({"n_prompt": -1}, "n_prompt is -1, expected at least 1"),
        ({"n_prompt": 10.0}, "n_prompt is 10.0, expected a whole number"),
        ({"n_output": 0}, "n_output is 0, expected at least 1"),
        ({"n_output": "100"}, "n_output is '100', expected a whole number"),
        ({"batch": 0}, "batch is 0, expected at least 1"),
        ({"batch": None}, "batch is None, expected a whole number"),
        ({"n_cached": -1}, "n_cached is -1, expected at least 0"),
        ({"n_cached": 1000}, "n_cached is 1000 of n_prompt 1000; at least the last token is computed"),
        ({"n_cached": 2000}, "n_cached is 2000 of n_prompt 1000"),
    ],
)
def test_numbers_that_cannot_be(arguments, match):
    with pytest.raises(InputError, match=match):
        predict(MISTRAL, FP16, "rtx-4090", **arguments)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"gpu": "rtx-4091"}, "no GPU 'rtx-4091'; known: .*rtx-4090"),
        ({"gpu": "rtx-4090", "compute": "fp15"}, "no compute format 'fp15'; known: fp32, fp16"),
        ({"gpu": "rtx-4090", "compute": "int4"}, "no compute format 'int4'"),
    ],
)
def test_names_that_are_not_known(arguments, match):
    with pytest.raises(UnknownName, match=match):
        predict(MISTRAL, FP16, **arguments)


# ---- the textbook's formulas


def test_rough_flops():
    assert formulas.prefill_flops_rough(1, 1000, 7_000_000_000) == 14_000_000_000_000
    assert formulas.decode_flops_rough(2, 100, 7_000_000_000) == 2_800_000_000_000
    assert formulas.prefill_flops_rough(np.array([1, 2]), 1000, 7).tolist() == [14_000, 28_000]


def test_effective_rate():
    assert formulas.effective_flops_per_s(312e12, 0.6) == 187.2e12
    assert formulas.effective_flops_per_s(312e12, np.array([0.5, 1])).tolist() == [156e12, 312e12]


@pytest.mark.parametrize("eta", [0, -0.5, 1.01, 60, float("nan"), np.array([0.5, 2.0])])
def test_an_efficiency_that_cannot_be(eta):
    with pytest.raises(InputError, match="efficiency is .*expected above 0 and at most 1"):
        formulas.effective_flops_per_s(312e12, eta)


def test_latency_of_short_and_long_answers():
    short, long = [formulas.latency_s(0.3, 0.01, n) for n in (80, 400)]
    assert (short, long) == (pytest.approx(1.1), pytest.approx(4.3))
    assert round(long / short, 2) == 3.91  # not 400 / 80
    assert formulas.latency_exact_s(0.3, 0.01, 80) == pytest.approx(0.3 + 79 * 0.01)
    assert formulas.latency_exact_s(0.3, 0.01, 1) == pytest.approx(0.3)
    assert formulas.tokens_per_s(0.3, 0.01, 80) == pytest.approx(80 / 1.1)


def test_latency_of_arrays():
    n_output = np.array([80, 400])
    assert formulas.latency_s(0.3, 0.01, n_output).tolist() == [formulas.latency_s(0.3, 0.01, n) for n in (80, 400)]
    assert formulas.tokens_per_s(np.array([0.3, 0.6]), 0.01, n_output) == pytest.approx([80 / 1.1, 400 / 4.6])
    assert formulas.latency_exact_s(0.3, np.array([0.01, 0.02]), 80) == pytest.approx([1.09, 1.88])
    assert formulas.breakeven_n_output(np.array([0.3, 0.6]), 0.01) == pytest.approx([30, 60])


@given(st.floats(0, 1e3), st.floats(1e-6, 1e3), st.integers(1, 10**6))
def test_rate_lies_between_its_limits(ttft_s, tpot_s, n_output):
    rate = formulas.tokens_per_s(ttft_s, tpot_s, n_output)
    assert rate * ABOUT <= 1 / tpot_s
    assert rate <= formulas.tokens_per_s(ttft_s, tpot_s, n_output + 1) / ABOUT


def test_breakeven_is_where_decoding_takes_as_long_as_the_prefill():
    assert formulas.breakeven_n_output(0.3, 0.01) == pytest.approx(30)
    assert formulas.breakeven_n_output(0, 0.01) == 0


@pytest.mark.parametrize(
    "function, arguments, match",
    [
        ("latency_s", (-0.1, 0.01, 10), "ttft_s is -0.1, expected 0 or more seconds"),
        ("latency_s", (0.1, -0.01, 10), "tpot_s is -0.01, expected 0 or more seconds"),
        ("latency_s", (0.1, float("nan"), 10), "tpot_s is nan, expected 0 or more seconds"),
        ("latency_s", (0.1, np.array([0.01, -0.01]), 10), "tpot_s is .*expected 0 or more seconds"),
        ("latency_s", (0.1, 0.01, 0), "n_output is 0, expected at least 1"),
        ("latency_s", (0.1, 0.01, 2.5), "n_output is 2.5, expected a whole number"),
        ("latency_exact_s", (-0.1, 0.01, 10), "ttft_s is -0.1"),
        ("tokens_per_s", (-0.1, 0.01, 10), "ttft_s is -0.1"),
        ("tokens_per_s", (0.1, 0.01, 0), "n_output is 0"),
        ("breakeven_n_output", (-0.3, 0.01), "ttft_s is -0.3, expected 0 or more seconds"),
        ("breakeven_n_output", (0.3, -0.01), "expected an amount of 0 or more and a positive rate"),
        ("breakeven_n_output", (0.3, 0), "expected an amount of 0 or more and a positive rate"),
        ("ttft_floor_s", (-1, 1e12), "-1 at .*expected an amount of 0 or more and a positive rate"),
        ("ttft_floor_s", (1e12, 0), "expected an amount of 0 or more and a positive rate"),
        ("tpot_floor_s", (1e9, -1e9), "expected an amount of 0 or more and a positive rate"),
        ("prefix_saving", (-1, 200), "n_prefix is -1, expected at least 0"),
        ("prefix_saving", (0, 0), "the prompt is empty"),
        ("kv_bytes_read", (T1, FP16, -1), "n_context is -1, expected at least 0"),
    ],
)
def test_formulas_refuse(function, arguments, match):
    with pytest.raises(InputError, match=match):
        getattr(formulas, function)(*arguments)


def test_floors_are_the_larger_of_two_times():
    assert formulas.ttft_floor_s(14e12, 1e14) == 0.14
    assert formulas.ttft_floor_s(14e12, 1e14, 14e9, 1e10) == 1.4
    assert formulas.tpot_floor_s(14e9, 1e12) == 0.014
    assert formulas.tpot_floor_s(14e9, 1e12, 14e12, 1e14) == 0.14
    assert formulas.ttft_floor_s(np.array([1e12, 3e12]), 1e13, 2e9, 1e10).tolist() == [0.2, 0.3]
    assert formulas.tpot_floor_s(14e9, np.array([1e12, 2e12])).tolist() == [0.014, 0.007]


def test_prefix_saving():
    assert formulas.prefix_saving(1200, 200) == 1 / 7
    assert formulas.prefix_saving(0, 200) == 1
    assert formulas.prefix_saving(np.array([0, 200, 1200]), 200).tolist() == [1, 0.5, 1 / 7]


def test_case_42_times_of_tokens():
    ttft_s, tpot_s = formulas.token_times(0, [1.0, 1.2, 1.4, 1.6])
    assert (ttft_s, tpot_s) == (1.0, pytest.approx(0.2))
    assert formulas.token_times(5.0, [6.0, 6.2, 6.4, 6.6]) == (pytest.approx(1.0), pytest.approx(0.2))
    assert formulas.token_times(0, [1.0]) == (1.0, None)


@given(
    st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True), st.floats(0, 100), st.floats(1e-4, 1),
    st.sampled_from([list, tuple, np.array]),
)
def test_a_line_is_found_again(n_output, b, k, kind):
    fitted_b, fitted_k, r2 = formulas.fit_latency_line(kind(n_output), kind([b + k * n for n in n_output]))
    assert fitted_k == pytest.approx(k, rel=1e-6)
    assert fitted_b == pytest.approx(b, rel=1e-6, abs=1e-6)
    assert r2 == pytest.approx(1)


def test_a_line_through_points_that_are_not_on_one():
    # By hand: means 2 and 2, slope (1 * 1 + 1 * 0) / 2 = 0.5; residuals 0.5, -1, 0.5 of a variance 1, -1, 0.
    b, k, r2 = formulas.fit_latency_line([1, 2, 3], [2, 1, 3])
    assert (b, k) == (pytest.approx(1), pytest.approx(0.5))
    assert r2 == pytest.approx(1 - 1.5 / 2)


def test_a_level_line():
    assert formulas.fit_latency_line([1, 2, 3], [5, 5, 5]) == (5, 0, 1)


def test_a_predicted_request_lies_on_its_own_line():
    n_output = np.arange(10, 200, 10)
    b, k, r2 = formulas.fit_latency_line(n_output, formulas.latency_s(0.086, 0.01425, n_output))
    assert (b, k, r2) == (pytest.approx(0.086), pytest.approx(0.01425), pytest.approx(1))


@pytest.mark.parametrize("n_output, latency_s", [([100], [1.5]), ([], []), ([100, 100], [1.5, 1.6]), ([1, 2, 3], [1.0, 2.0])])
def test_a_line_needs_two_points(n_output, latency_s):
    with pytest.raises(InputError, match="needs two different n_output at least, and a latency for each"):
        formulas.fit_latency_line(n_output, latency_s)


@pytest.mark.parametrize("n_output, latency_s, match", [
    ([1, 2], [1.0, -0.1], "latency_s is .*-0.1.*, expected finite numbers from 0"),
    ([1, 2], [1.0, float("nan")], "latency_s is .*nan"),
    ([1, 2], [1.0, float("inf")], "latency_s is .*inf"),
    ([0, 2], [1.0, 2.0], "n_output is .*0.*, expected finite numbers from 1"),
])  # fmt: skip
def test_a_line_through_what_cannot_be(n_output, latency_s, match):
    with pytest.raises(InputError, match=match):
        formulas.fit_latency_line(n_output, latency_s)


@pytest.mark.parametrize("peak", [0, -312e12, float("nan")])
def test_a_peak_that_cannot_be(peak):
    with pytest.raises(InputError, match="peak is .*expected a positive rate"):
        formulas.effective_flops_per_s(peak, 0.6)


def test_kv_read_under_a_window():
    windowed = replace(T1, sliding_window=4)
    row = formulas.kv_bytes_per_token(T1, FP16)
    assert row == 64  # 2 layers * 2 (K, V) * 2 heads * 4 * 2 bytes
    for n_context, n_rows in [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4), (1000, 4)]:
        assert formulas.kv_bytes_read(windowed, FP16, n_context) == n_rows * row
        assert formulas.kv_bytes_read(T1, FP16, n_context, batch=3) == 3 * n_context * row
        assert formulas.kv_bytes_held(windowed, FP16, n_context) == min(n_rows, 3) * row
    assert formulas.kv_bytes_read(windowed, FP16, np.array([3, 4, 5]), batch=2).tolist() == [6 * row, 8 * row, 8 * row]


def test_scalars_in_scalars_out():
    """A caller who passes plain numbers gets plain numbers, which print and serialise as such."""
    results = [
        formulas.n_parameters(T1), formulas.weight_bytes(T1, FP16), formulas.kv_bytes_read(T1, FP16, 3),
        formulas.prefill_flops_rough(1, 2, 3), formulas.effective_flops_per_s(1e12, 0.5), formulas.latency_s(0.1, 0.2, 3),
        formulas.latency_exact_s(0.1, 0.2, 3), formulas.tokens_per_s(0.1, 0.2, 3), formulas.prefix_saving(1, 2),
        *formulas.fit_latency_line([1, 2], [1.0, 2.0]), formulas.breakeven_n_output(0.3, 0.1),
        formulas.ttft_floor_s(1e12, 1e13), formulas.tpot_floor_s(1e9, 1e12),
        *formulas.forward_counts(T1, FP16, 1, 0, 1),
    ]  # fmt: skip
    assert {type(result) for result in results} <= {int, float}


# ---- what the documentation shows


@pytest.mark.parametrize("name", ["costmodel.formulas", "costmodel.profiles"])
def test_examples_in_the_docstrings(name):
    results = doctest.testmod(sys.modules[name], extraglobs={"npinfer": npinfer})
    assert results.attempted > 0
    assert results.failed == 0


def test_the_package_names_what_it_offers():
    for name in costmodel.__all__:
        assert hasattr(costmodel, name)


def test_a_model_that_is_made_of_the_largest_sizes_is_still_predicted():
    huge = ModelConfig(n_layers=2**16, d_model=2**31, n_heads=2**10, d_ff=2**31, vocab_size=2**31)
    floor = predict(huge, FP16, "rtx-4090", n_prompt=10**9, n_output=10**9, batch=10**6).floor
    assert math.isfinite(floor.ttft_s) and math.isfinite(floor.tpot_s)


@pytest.mark.parametrize("n_output, generations", [(2, 0), (3, 1), (2, 2)])
def test_a_ledger_of_another_request_is_refused(n_output, generations):
    """A prefill alone, a decode that is too short, two requests at once."""
    model = Transformer.shape_only(T1, FP16)
    with Ledger() as ledger:
        for _ in range(generations):
            npinfer.generate(model, [[1, 2, 3]], 2)
        if not generations:
            model.prefill([[1, 2, 3]], model.new_cache())
    with pytest.raises(InputError, match="record one npinfer.generate"):
        predict_from(ledger, "rtx-4090", config=T1, precision=FP16, n_prompt=3, n_output=n_output)


@pytest.mark.parametrize("number", [np.int16, np.int32, np.int64, np.uint64, lambda n: np.array(n, np.int32)])
def test_numpy_scalars_do_not_wrap(number):
    assert formulas.kv_bytes_read(MISTRAL, FP16, 10**6, number(30000)) == 10**6 * 30000 * 131_072
    assert formulas.prefill_flops_rough(1, number(30000), 7 * 10**18) == 2 * 30000 * 7 * 10**18


def test_a_long_context_streams_more_than_the_cache_holds():
    """The floor applies by what a step streams: a small model's KV counts too."""
    small = preset("smollm2-135m")
    assert not predict(small, FP16, "rtx-4090", n_prompt=100).floor_applies
    assert predict(small, FP16, "rtx-4090", n_prompt=8000).floor_applies
