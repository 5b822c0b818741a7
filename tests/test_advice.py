"""What --advise says: every figure is a prediction with one thing changed by hand, and nothing is a gain that is none."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import costmodel
from costmodel import GPU, gpu, gpus, predict
from costmodel.advice import advise
from npinfer import InputError, Precision, UnknownName, preset, presets
from strategies import T1, any_config, batches, configs, precisions

MISTRAL, LLAMA70 = preset("mistral-7b"), preset("llama-2-70b")
FP16 = Precision()
LEVELS = ("floor", "roofline", "expected")
FIELDS = ("ttft_s", "tpot_s", "latency_s", "latency_exact_s", "tokens_per_s")
PREFIX = "prefix cache, half the prompt"
TOY = GPU("toy", memory_bytes=10**12, memory_bytes_per_s=1e9, matmul_flops_per_s={"fp16": 1e12}, vector_flops_per_s=1e11)
devices = st.sampled_from([gpu(name) for name in ("rtx-4090", "a100-sxm-80gb", "h100-sxm", "gtx-1080-ti")]) | st.builds(
    GPU,
    name=st.just("any"),
    memory_bytes=st.integers(10**2, 10**5),
    memory_bytes_per_s=st.floats(1e6, 1e15),
    matmul_flops_per_s=st.fixed_dictionaries({}, optional={
        name: st.floats(1e6, 1e18) for name in ("fp32", "fp16", "bf16", "fp8")
    }),
    vector_flops_per_s=st.none() | st.floats(1e6, 1e18),
)


def levers(advice):
    return {lever["lever"]: lever for lever in advice["gains"] + advice["no_gain"]}


def figures(prediction, level):
    return {field: getattr(getattr(prediction, level), field) for field in FIELDS}


def shown(lever, level):
    return {field: lever[level][field] for field in FIELDS}


def test_each_lever_is_a_prediction_with_one_thing_changed():
    advice = advise(MISTRAL, FP16, "rtx-4090", 1000, 100)
    request = {"n_prompt": 1000, "n_output": 100}
    by_hand = {
        PREFIX: predict(MISTRAL, FP16, "rtx-4090", **request, n_cached=500),
        "int8 weights": predict(MISTRAL, Precision(weights="int8"), "rtx-4090", **request),
        "int4 weights": predict(MISTRAL, Precision(weights="int4"), "rtx-4090", **request),
        "int8 KV": predict(MISTRAL, Precision(kv="int8"), "rtx-4090", **request),
        "fp8 KV": predict(MISTRAL, Precision(kv="fp8"), "rtx-4090", **request),
        "batch 8": predict(MISTRAL, FP16, "rtx-4090", **request, batch=8),
        "session cache": predict(MISTRAL, FP16, "rtx-4090", n_prompt=2100, n_output=100, n_cached=1099),
    }
    found = levers(advice) | {"batch 8": advice["throughput"], "session cache": advice["next_turn"]}
    now = predict(MISTRAL, FP16, "rtx-4090", **request)
    for level in LEVELS:
        assert shown(advice["now"], level) == figures(now, level)
        for name, prediction in by_hand.items():
            assert shown(found[name], level) == figures(prediction, level)
        turn = predict(MISTRAL, FP16, "rtx-4090", n_prompt=2100, n_output=100)
        assert shown(advice["next_turn"]["without"], level) == figures(turn, level)
        saved = turn.floor.latency_exact_s - by_hand["session cache"].floor.latency_exact_s
        assert advice["next_turn"]["floor"]["saved_s"] == saved
        # 8 sequences in the time that they take together, against one in its own
        batch_s, one_s = getattr(by_hand["batch 8"], level).latency_exact_s, getattr(now, level).latency_exact_s
        assert advice["throughput"][level]["throughput_factor"] == pytest.approx(8 * one_s / batch_s, rel=1e-12)
        assert advice["throughput"][level]["total_tokens_per_s"] == 8 * getattr(by_hand["batch 8"], level).tokens_per_s
    assert advice["throughput"]["gain"] and advice["throughput"]["roofline"]["saved_s"] < 0
    assert advice["next_turn"]["prompt_tokens"] == 2100 and advice["next_turn"]["n_cached"] == 1099


@pytest.mark.parametrize("quantity, rate", [
    ("bandwidth", lambda profile: profile.memory_bytes_per_s),
    ("matmul rate", lambda profile: profile.matmul_flops_per_s.get("fp16", 0)),
])  # fmt: skip
@pytest.mark.parametrize("name", ["rtx-4090", "a100-sxm-80gb", "rtx-3060"])
def test_the_next_gpu_is_the_next_of_a_sorted_list(name, quantity, rate):
    advice = advise(MISTRAL, Precision(weights="int4"), name, 1000, 100)
    (found,) = [lever for lever in levers(advice) if lever.startswith(f"next higher {quantity}, ")]
    better = gpu(found.rpartition(", ")[2])
    known = [gpu(other) for other in gpus() if "fp16" in gpu(other).matmul_flops_per_s]
    room = sorted({rate(other) for other in known if other.memory_bytes >= advice["memory_bytes_needed"]})
    assert rate(better) == room[room.index(rate(gpu(name))) + 1]
    changed = predict(MISTRAL, Precision(weights="int4"), better, 1000, 100)
    assert shown(levers(advice)[found], "roofline") == figures(changed, "roofline")


def test_no_profile_is_above_the_highest():
    best = max([gpu(name) for name in gpus()], key=lambda profile: profile.memory_bytes_per_s)
    left_out = {lever["lever"] for lever in advise(MISTRAL, FP16, best, 1000, 100)["left_out"]}
    assert "next higher bandwidth" in left_out


# ---- what comes first


def test_a_long_answer_wants_fewer_bits():
    advice = advise(MISTRAL, FP16, "rtx-4090", 1000, 1000)
    assert advice["dominates"] == "decode"
    assert [lever["lever"] for lever in advice["gains"]][:2] == ["int4 weights", "int8 weights"]
    assert advice["first"]["lever"] == "int4 weights"
    assert (advice["first"]["phase"], advice["first"]["bound"]) == ("decode", "bandwidth")


def test_a_long_prompt_wants_a_cache():
    advice = advise(MISTRAL, FP16, "rtx-4090", 16_000, 1)
    assert advice["dominates"] == "prefill"
    assert advice["first"]["lever"] == advice["gains"][0]["lever"] == PREFIX
    assert (advice["first"]["phase"], advice["first"]["phase_share"], advice["first"]["bound"]) == ("prefill", 1.0, "compute")
    # Only attention waits for bytes, a little: 16,000 rows of 65,536 bytes fewer are 1 ms of 1.6 s.
    (lever,) = [lever for lever in advice["no_gain"] if lever["lever"] == "fp8 KV"]
    assert lever["floor"]["saved_s"] == 0 < lever["roofline"]["saved_share"] < 0.001


def test_fewer_bits_are_no_gain_where_all_is_bound_by_compute():
    # 64 sequences on a device that moves bytes far faster than it computes: nothing waits for bytes, and scales are work.
    device = replace(TOY, memory_bytes_per_s=1e15)
    advice = advise(MISTRAL, FP16, device, 1000, 100, batch=64)
    lost = {lever["lever"]: lever for lever in advice["no_gain"]}
    assert {"int8 weights", "int4 weights", "int8 KV", "fp8 KV"} <= lost.keys()
    assert lost["int4 weights"]["roofline"]["saved_s"] < 0 == lost["int4 weights"]["floor"]["saved_s"]
    assert 0 == lost["int8 KV"]["floor"]["saved_s"] < lost["int8 KV"]["roofline"]["saved_share"] < 1e-8


@pytest.mark.parametrize("n_prompt, n_output", [(1000, 100), (1000, 1), (32000, 100000)])
def test_where_the_phases_cross(n_prompt, n_output):
    """The answer's length at which decoding overtakes is the same however long this answer is."""
    crossing = advise(MISTRAL, FP16, "rtx-4090", n_prompt, n_output)["breakeven_n_output"]
    for name in ("floor", "roofline"):
        for n, longer in ((crossing[name] - 1, False), (crossing[name], True)):
            level = getattr(predict(MISTRAL, FP16, "rtx-4090", n_prompt, n), name)
            assert ((n - 1) * level.tpot_s >= level.ttft_s) == longer


def test_which_phase_dominates():
    # The prefill takes 6.5 steps by the roofline: 7 output tokens take 6 of them, 8 take 7.
    assert advise(MISTRAL, FP16, "rtx-4090", 1000, 100)["breakeven_n_output"]["roofline"] == 8
    assert [advise(MISTRAL, FP16, "rtx-4090", 1000, n)["dominates"] for n in (1, 7, 8)] == ["prefill", "prefill", "decode"]


def test_phases_against_the_ridge():
    phases = advise(MISTRAL, FP16, "rtx-4090", 1000, 100)["phases"]
    # 14,221,312,000,000 FLOPs over 14,491,656,192 bytes; 165.2e12 / 1008e9
    assert phases["prefill"]["of_ridge"] == pytest.approx(14_221_312_000_000 / 14_491_656_192 / (165.2e12 / 1008e9), rel=1e-12)
    assert phases["prefill"]["bound"] == {"floor": "compute", "roofline": "compute", "expected": "compute"}
    assert phases["decode"]["of_ridge"] < 0.01 and set(phases["decode"]["bound"].values()) == {"bandwidth"}
    assert advise(MISTRAL, FP16, "rtx-4090", 1000, 1)["phases"].keys() == {"prefill"}


def test_a_batch_that_all_but_waits_for_compute_is_no_gain():
    # Only prefills of 8000 tokens: eight are bound by compute as one is, and share only a pass over the weights.
    batch = advise(MISTRAL, FP16, "rtx-4090", 8000, 1)["throughput"]
    assert 1 <= batch["floor"]["throughput_factor"] < batch["roofline"]["throughput_factor"] < 1.001
    assert not batch["gain"]


# ---- capacity


def test_what_makes_a_model_fit():
    advice = advise(MISTRAL, FP16, "rtx-3060", 1000, 100)
    assert not advice["fits"]
    fitting = {fit["change"]: fit for fit in advice["what_fits"]}
    # 7,244,878,848 bytes at int8 (7.24e9 and the scales), and 1,099 rows of KV
    assert fitting["int8 weights"]["memory_bytes_needed"] == 7_244_878_848 + 1099 * 131_072
    assert "int8 KV" not in fitting and "batch 1" not in fitting
    (name,) = set(fitting) - {"int8 weights", "int4 weights", "int4 weights and int8 KV"}
    needed = advice["memory_bytes_needed"]
    assert gpu(name).memory_bytes == min([gpu(other).memory_bytes for other in gpus() if gpu(other).memory_bytes >= needed])
    assert all(lever["fits"] for lever in advice["gains"])
    assert PREFIX in [lever["lever"] for lever in advice["no_gain"]]  # faster, and still without room


def test_a_batch_that_does_not_fit():
    advice = advise(MISTRAL, FP16, "rtx-4090", 20_000, 100, batch=6)
    assert not advice["fits"]
    assert "batch 1" in [fit["change"] for fit in advice["what_fits"]]
    assert not advice["throughput"]["fits"] and not advice["throughput"]["gain"]


# ---- what does not apply


def test_levers_that_are_pulled_already_are_left_out():
    advice = advise(MISTRAL, Precision("int4", "fp8"), "rtx-4090", 1, 1, batch=8)
    left_out = {lever["lever"]: lever["why"] for lever in advice["left_out"]}
    assert left_out["int4 weights"] == left_out["int8 weights"] == "weights have 4 bits already"
    assert left_out["8-bit KV"] == "KV has 8 bits already"
    assert left_out[PREFIX] == "the prompt's only token is always computed"
    assert advice["throughput"] is None
    mixed = advise(MISTRAL, Precision(bits_per_weight=4.83), "rtx-4090", 1000, 100)
    assert "int4 weights" in levers(mixed) and "int8 weights" not in levers(mixed)


def test_a_batch_of_a_mixture_touches_more_experts():
    mixtral = preset("mixtral-8x7b-v0.1")
    advice, dense = [advise(config, FP16, "h200-sxm", 1000, 100)["throughput"] for config in (mixtral, MISTRAL)]
    assert advice["expert_share"] == [0.25, 1 - 0.75**8]  # 90 %
    assert "expert_share" not in dense
    # Whichever experts are chosen, two are read: the floor cannot know better, as for a dense model.
    assert advice["floor"]["throughput_factor"] == pytest.approx(dense["floor"]["throughput_factor"], rel=0.1)
    # A step of one reads 25.5 GB, one of eight 85 GB: 32 layers of 8 x 3 x 14,336 x 4,096 x 2 bytes, 0.9 of them for 0.25.
    experts = 32 * 8 * 3 * 14_336 * 4_096 * 2
    more = ((1 - 0.75**8) - 0.25) * experts
    now, then = [predict(mixtral, FP16, "h200-sxm", 1000, 100, batch) for batch in (1, 8)]
    kv_and_rows = 7 * (32 * 2 * 8 * 128 * 2 * 1051 + 2 * 4096)
    grown = (then.decode.streamed_bytes - now.decode.streamed_bytes) / 99
    assert grown == pytest.approx(more + kv_and_rows, rel=1e-9)
    assert 2 < advice["roofline"]["throughput_factor"] < 3 < dense["roofline"]["throughput_factor"]


def test_no_next_turn_where_positions_end():
    advice = advise(preset("gpt-2"), FP16, "rtx-4090", 500, 100)
    (left_out,) = [lever["why"] for lever in advice["left_out"] if lever["lever"] == "session cache"]
    assert advice["next_turn"] is None and left_out == "a next turn is longer than the 1024 learned positions"
    assert advise(preset("gpt-2"), FP16, "rtx-4090", 400, 100)["next_turn"]["prompt_tokens"] == 900


@pytest.mark.parametrize("name", presets())
def test_every_model_is_advised(name):
    advice = advise(preset(name), FP16, "h200-sxm", 400, 100)
    assert advice["first"]["lever"] == advice["gains"][0]["lever"] if advice["gains"] else not advice["fits"]
    assert {"int8 weights", "int4 weights", "int8 KV"} <= levers(advice).keys()
    bounds = advice["phases"]["decode"]["bound"]
    assert (bounds["floor"], bounds["roofline"]) == ("bandwidth", "bandwidth")
    assert bounds["expected"] in ("bandwidth", "launches")  # of small models, launches


def test_without_a_matmul_rate_the_decode_is_ranked_alone():
    device = GPU("slow", memory_bytes=10**11, memory_bytes_per_s=1e11)
    advice = advise(MISTRAL, FP16, device, 1000, 100)
    assert (advice["dominates"], advice["next_turn"], advice["first"]["phase_share"]) == (None, None, None)
    assert advice["first"]["lever"].startswith(("int4", "next higher"))
    steps_s = [99 * predict(MISTRAL, Precision(weights=name), device, 1000, 100).floor.tpot_s for name in ("fp16", "int4")]
    assert levers(advice)["int4 weights"]["floor"]["saved_s"] == steps_s[0] - steps_s[1]
    assert {PREFIX, "next higher matmul rate"} <= {lever["lever"] for lever in advice["left_out"]}
    nothing = advise(MISTRAL, FP16, device, 1000, 1)
    assert nothing["first"] is None and not levers(nothing) and not nothing["throughput"]["gain"]


@settings(max_examples=60)
@given(
    config=configs() | any_config(), precision=precisions(), device=devices,
    n_prompt=st.integers(1, 12), n_output=st.integers(1, 8), batch=batches | st.just(64),
)  # fmt: skip
@example(T1, FP16, TOY, 1, 1, 1)
def test_gains_are_gains_and_ranked(config, precision, device, n_prompt, n_output, batch):
    advice = advise(config, precision, device, n_prompt, n_output, batch)
    saved = [lever["roofline"]["saved_s"] for lever in advice["gains"]]
    assert saved == sorted(saved, reverse=True)
    assert all(lever["roofline"]["saved_share"] >= 0.001 for lever in advice["gains"])
    assert all(lever["floor"]["saved_s"] >= 0 and lever["fits"] for lever in advice["gains"])
    for lever in advice["no_gain"]:
        losses = [level for level in LEVELS if (lever[level]["saved_s"] or 0) < 0]
        assert not lever["fits"] or losses or lever["roofline"]["saved_share"] < 0.001
    assert (advice["first"] is None) == (not saved)
    names = [*levers(advice), *[lever["lever"] for lever in advice["left_out"]]]
    assert len(names) == len(set(names))
    for part in (PREFIX, "int8 weights", "int4 weights", "KV", "bandwidth", "matmul rate"):
        assert any(part in name for name in names)
    if (crossing := advice["breakeven_n_output"]["floor"]) is not None:
        level = predict(config, precision, device, n_prompt, crossing, batch).floor
        assert (crossing - 1) * level.tpot_s >= level.ttft_s


@pytest.mark.parametrize("arguments, error", [
    ((1000, 0), InputError), ((0, 100), InputError), ((1000, 100, 0), InputError), ((1000, 100, 1, "fp7"), UnknownName),
])  # fmt: skip
def test_requests_that_are_none_are_refused(arguments, error):
    with pytest.raises(error):
        advise(MISTRAL, FP16, "rtx-4090", *arguments)
    with pytest.raises(costmodel.ProfileError):
        advise(MISTRAL, FP16, 4090, 1000, 100)
