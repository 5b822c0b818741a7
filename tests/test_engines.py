"""Engine profiles and the expected level: names, times worked by hand, order of the levels, several devices."""

import doctest
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel
from costmodel import GPU, engines, expected, formulas, gpu, gpus, predict, predict_from, prediction
from npinfer import InputError, Ledger, ModelConfig, Precision, Transformer, UnknownName, generate, preset
from npinfer.generate import no_tokens
from strategies import configs, precisions

MISTRAL, LLAMA3 = preset("mistral-7b"), preset("llama-3-8b")
FP16 = Precision()
Q4 = Precision(bits_per_weight=4.5)
PARAMETERS = engines.parameters()
TABLES = [engines._engine(name) for name in engines.names()]


def value(name):
    return PARAMETERS[name].value


@pytest.mark.parametrize(("asked", "vendor", "table"), [
    ("vllm", "NVIDIA", "vllm"), ("vLLM", "NVIDIA", "vllm"), ("VLLM 0.7", "NVIDIA", "vllm-0.7"), ("vLLM 0.7.3", "NVIDIA", "vllm-0.7"),
    ("vllm 0.6.1.post2", "NVIDIA", "vllm-0.7"), ("vLLM 0.20.1+transformers-5.8.1", "NVIDIA", "vllm"), ("vllm v0.8", "NVIDIA", "vllm"),
    ("SGLang 0.5.6", "NVIDIA", "sglang"), ("TensorRT-LLM", "NVIDIA", "tensorrt-llm"), ("TRT-LLM 0.9", "NVIDIA", "tensorrt-llm"),
    ("llama.cpp", "NVIDIA", "llama.cpp"), ("Llama-cpp", "NVIDIA", "llama.cpp"), ("llama.cpp May 2024", "NVIDIA", "llama.cpp-2024"),
    ("llama.cpp b3000", "NVIDIA", "llama.cpp-2024"), ("llama.cpp b6000", "NVIDIA", "llama.cpp"),
    ("llama.cpp 2f68ce7cf (6918)", "NVIDIA", "llama.cpp"), ("llama.cpp", "Apple", "llama.cpp-metal"),
    ("llama.cpp May 2024", "Apple", "llama.cpp-metal"), ("llama.cpp", "AMD", "llama.cpp-rocm"), ("llama.cpp", "Intel", "llama.cpp-vulkan"),
    ("llama.cpp vulkan", "AMD", "llama.cpp-vulkan"), ("calm", "Apple", "calm-metal"), ("torchao", "NVIDIA", "torch-compile"),
    ("gpt-fast", "AMD", "torch-compile"), ("exllamav2 0.1", "NVIDIA", "exllama"), ("generic", "Apple", "generic"),
])  # fmt: skip
def test_names_are_found_with_their_version_and_device(asked, vendor, table):
    assert engines.engine(asked, vendor).name == table


@pytest.mark.parametrize("asked", ["", "vlm", "vllmx", "ray", "0.7", "llama"])
def test_an_unknown_engine_is_refused_and_generic_named(asked):
    with pytest.raises(UnknownName, match=f"no engine '{asked}'; known: generic, vllm, .*generic is for an engine that is not listed"):
        engines.engine(asked)


def test_attention_can_be_said_to_be_fused_or_not():
    assert [engines.engine(f"llama.cpp{suffix}").unfused for suffix in ("", " unfused", " fused")] == [False, True, False]
    assert [engines.engine(f"llama.cpp 2023 {suffix}").unfused for suffix in ("", "fused")] == [True, False]


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_every_parameter_reads_as_physics(parameter):
    assert parameter.per in {"stream", "matrix", "vector", "layer", "request", "score", "score_byte"}
    assert parameter.value > 0 and parameter.unit and len(parameter.meaning) > 10
    assert parameter.fixed or (parameter.rows >= 4 and parameter.devices >= 2)
    if parameter.per in ("stream", "matrix"):
        assert parameter.value >= 1  # nothing is faster than the datasheet
    assert any(parameter.name in _used(table) for table in TABLES)


def _used(table):
    products = [name for names in table.products.values() for name in names]
    layers = [*table.layer, *table.sparse_layer, *table.request]
    return {table.stream, table.slow_stream, *layers, *products, table.score, table.score_byte} - {""}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_engine_says_what_it_stands_on(table):
    assert _used(table) <= PARAMETERS.keys() and table.source
    assert {*table.by_vendor.values(), *table.versions.values()} <= set(engines.names())
    for low, high in () if table.interpreted else table.ranges:
        assert 0 < low < 1 < high
    if table.rows_decode + table.rows_prefill:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", table.date)
    assert table.basis["engine"] == table.name


def test_a_decode_step_by_hand():
    """Llama 3 8B, 16 bits, on a 4090, step on 1000 cached tokens: bytes / bandwidth and 32 layers."""
    step = predict(LLAMA3, FP16, "rtx-4090", n_prompt=1000, n_output=2, engine="vllm")
    # 2 B * (8,030,261,248 parameters - 128256 * 4096 of the embedding), 131,072 B of KV a token, 1000 read and 1001 seen
    streamed = 2 * (8_030_261_248 - 128_256 * 4096) + 131_072 * 1001 + 131_072 + 8192
    activations = sum(cost[3] for cost in step.decode.costs) - sum(cost[2] for cost in step.decode.costs)
    assert sum(cost[2] for cost in step.decode.costs) == streamed
    by_hand = value("stream") * (streamed + activations) / 1008e9 + 32 * value("layer_graph")
    assert step.expected.tpot_s == pytest.approx(by_hand, rel=1e-12)
    assert step.expected.decode_bound == "bandwidth"


def test_an_int8_prefill_by_hand():
    """1000 tokens, quantised, on a 3090: weights read for each of 8 tiles of 128 tokens, two micro-batches of launches."""
    config = preset("llama-2-7b")
    whole = predict(config, Q4, "rtx-3090", n_prompt=1000, n_output=1, engine="llama.cpp")
    assert whole.compute == "int8"
    phase, weights = whole.prefill, formulas.weight_bytes(config, Q4, streamed=True)
    moved = sum(cost[3] for cost in phase.costs) + 7 * weights
    by_hand = (
        value("stream") * moved / 936.2e9
        + 2 * 32 * value("layer_cuda")
        + value("vector_int8") * phase.needed_flops / 35.58e12
    )
    assert whole.expected.ttft_s == pytest.approx(by_hand, rel=1e-12)


def test_a_prefill_of_2024_by_hand():
    """The same with fp16 kernels: weights widened in each micro-batch, and scores that go through memory."""
    config = preset("llama-2-7b")
    whole = predict(config, Q4, "rtx-3090", n_prompt=1000, n_output=1, engine="llama.cpp 2024")
    assert whole.compute == "fp16-fp16acc"
    phase, weights = whole.prefill, formulas.weight_bytes(config, Q4, streamed=True)
    moved = sum(cost[3] for cost in phase.costs) + weights + 2 * 4 * (6_738_415_616 - 32_000 * 4096)
    pairs = 32 * 32 * 1000 * 1001 // 2  # layers, heads, queries and the keys before them
    by_hand = (
        (value("stream") * moved + value("score_bytes") * pairs) / 936.2e9
        + 2 * 32 * (value("layer_cuda") + value("layer_cuda_2024"))
        + phase.needed_flops * (1 / 142.3e12 + value("vector_fp16") / 35.58e12)
    )
    assert whole.expected.ttft_s == pytest.approx(by_hand, rel=1e-12)


def test_a_prefill_with_experts_by_hand():
    """gpt-oss-20b, 1000 tokens, 4 of 32 experts each: dense weights again for each of 8 tiles, experts' for each of 2 pieces."""
    config = preset("gpt-oss-20b")
    whole = predict(config, Q4, "rtx-3090", n_prompt=1000, n_output=1, engine="llama.cpp")
    phase, one = whole.prefill, formulas.weight_bytes(config, Q4, streamed=True)
    # all experts are touched by 1000 tokens: 24 layers of 32 * 3 * 2880 * 2880 weights at 4.5 bits, and biases of 3 * 2880 fp16
    touched = 24 * 32 * (3 * 2880 * 2880 * 9 // 16 + 3 * 2880 * 2)
    moved = sum(cost[3] for cost in phase.costs) + 7 * (one - touched // 8) + touched
    by_hand = (
        value("stream") * moved / 936.2e9
        + 2 * 24 * (value("layer_cuda") + value("layer_experts"))
        + value("vector_int8") * phase.needed_flops / 35.58e12
    )
    assert whole.expected.ttft_s == pytest.approx(by_hand, rel=1e-9)


def test_a_request_to_a_server_waits_once():
    """TTFT on an H100: bytes, products, layers, and the server's own time."""
    whole = predict(LLAMA3, FP16, "h100-sxm", n_prompt=1000, n_output=1, engine="vllm")
    by_hand = (
        value("stream") * sum(cost[3] for cost in whole.prefill.costs) / 3350e9
        + value("matrix_share") * whole.prefill.needed_flops / 989.4e12
        + 32 * value("layer_graph")
        + value("request_graph")
    )
    assert whole.expected.ttft_s == pytest.approx(by_hand, rel=1e-3)


def test_a_stream_is_slower_on_hbm_and_before_ampere():
    def stream(name, precision, engine="llama.cpp"):
        profile, config = gpu(name), preset("llama-2-7b")
        step = predict(config, precision, profile, 1000, 2)
        work = prediction.works(config, precision, step.prefill, step.decode, 1000, 2, 1, 0)[1]
        return expected.amounts(engines.engine(engine, profile.vendor), profile, "fp16", work)[0][0]

    assert [stream(name, Q4) for name in ("rtx-3090", "a100-sxm-80gb", "rtx-2080-ti", "titan-xp")] == ["stream", *["slow_stream"] * 3]
    assert stream("rtx-2080-ti", FP16) == stream("a100-sxm-80gb", Q4, "vllm") == "stream"
    assert stream("instinct-mi300x", Q4) == "slow_stream" and stream("radeon-rx-7900-xtx", Q4) == "stream_rocm"


@given(st.integers(0, 9), st.integers(1, 9), st.none() | st.integers(1, 12))
def test_needed_pairs_are_those_that_the_mask_leaves(n_cached, n_new, window):
    config = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=8, vocab_size=7, sliding_window=window)
    seen = [
        (query, key)
        for query in range(n_cached, n_cached + n_new)
        for key in range(query + 1)
        if window is None or query - key < window
    ]
    phases = predict(config, FP16, "h100-sxm", n_cached + n_new, 1, 4, n_cached)
    (work, _) = prediction.works(config, FP16, phases.prefill, phases.decode, n_cached + n_new, 1, 4, n_cached)
    assert work.pairs == 4 * 2 * 3 * len(seen)


@given(
    configs(), precisions(), st.sampled_from(gpus()), st.sampled_from(engines.names()), st.integers(1, 3000), st.integers(1, 40),
    st.integers(1, 5), st.data(),
)  # fmt: skip
def test_floor_roofline_expected_in_this_order(config, precision, name, engine, n_prompt, n_output, batch, data):
    n_cached = data.draw(st.integers(0, n_prompt - 1))
    found = predict(config, precision, name, n_prompt, n_output, batch, n_cached, engine)
    for field in ("ttft_s", "tpot_s", "latency_s", "latency_exact_s"):
        times = [getattr(level, field) for level in (found.floor, found.roofline, found.expected)]
        known = [time for time in times if time is not None]
        assert known == sorted(known)
    for time, span in ((found.expected.ttft_s, found.expected.ttft_range_s), (found.expected.tpot_s, found.expected.tpot_range_s)):
        assert (span is None) == (time is None)
        assert span is None or 0 < span[0] < span[1]


def test_what_cannot_be_known_is_null():
    found = predict(MISTRAL, Q4, "apple-m1-max-core-count-unspecified", engine="llama.cpp")  # no rate of any product
    assert found.expected.ttft_s is None and found.expected.ttft_range_s is None and found.expected.tpot_s > found.floor.tpot_s
    spark = predict(preset("llama-2-7b"), Q4, "dgx-spark-gb10", n_output=1, engine="llama.cpp")
    assert spark.missing == ("matmul_flops_per_s.int8",) and spark.floor.ttft_s is None
    assert spark.expected.ttft_s > 0  # of int8 kernels the vector work is what counts


def test_the_format_is_the_engines_unless_it_is_stated():
    def format_(name, precision, engine, compute=None):
        return predict(MISTRAL, precision, name, engine=engine, compute=compute).compute

    assert format_("rtx-4090", Q4, "generic") == "fp16"
    assert format_("rtx-4090", Q4, "llama.cpp") == "int8"
    assert format_("rtx-4090", FP16, "llama.cpp") == "fp16-fp16acc"
    assert format_("v100-sxm2-16gb", Q4, "llama.cpp") in ("fp16", "fp16-fp16acc")  # its int8 rate is the slower one
    assert format_("rtx-4090", Q4, "llama.cpp", "fp16") == "fp16"


# --- reference points --------------------------------------------------------


def test_llama_3_8b_on_an_h100_against_its_floors():
    """Measured by others with vLLM: TTFT 21.6 ms, TPOT 6.18 ms."""
    found = predict(LLAMA3, FP16, "h100-sxm", n_prompt=1000, engine="vllm")
    assert (round(found.floor.ttft_s * 1e3, 2), round(found.floor.tpot_s * 1e3, 2)) == (14.37, 4.52)
    assert found.floor.ttft_s < 21.6e-3 < found.expected.ttft_range_s[1]
    assert found.floor.tpot_s < 6.18e-3 < found.expected.tpot_range_s[1]


@pytest.mark.parametrize(("n_context", "floor", "measured"), [(1, 67.2, 61), (4096, 65, 59)])
def test_calm_on_an_rtx_4090(n_context, floor, measured):
    found = predict(LLAMA3, FP16, "rtx-4090", n_prompt=n_context, n_output=33, engine="calm")
    assert 1 / found.floor.tpot_s == pytest.approx(floor, abs=0.2)
    slow, fast = sorted(1 / seconds for seconds in found.expected.tpot_range_s)
    assert slow < measured < fast
    assert 1 / found.expected.tpot_s == pytest.approx(measured, rel=0.1)


def test_a_prompt_cached_but_for_its_last_token_takes_one_decode_step():
    warm = predict(LLAMA3, FP16, "h100-sxm", n_prompt=1000, n_output=2, n_cached=999)
    assert warm.floor.ttft_s == pytest.approx(warm.floor.tpot_s, rel=1e-3)
    assert warm.floor.ttft_s == pytest.approx(4.5e-3, rel=0.01)
    assert warm.expected.ttft_s >= warm.floor.ttft_s


# --- several devices -----------------------------------------------------------


def test_two_devices_share_the_work_and_add_up_their_sums():
    one = predict(LLAMA3, FP16, "h100-sxm", engine="vllm")
    two = predict(LLAMA3, FP16, "h100-sxm", engine="vllm", n_gpus=2)
    assert (two.floor.ttft_s, two.floor.tpot_s) == (one.floor.ttft_s / 2, one.floor.tpot_s / 2)
    assert two.gpu.memory_bytes == 2 * one.gpu.memory_bytes and two.n_gpus == 2
    # a ring of two sends all of 32 layers * 2 * 1000 tokens * 4096 * 2 B once, at 450 GB/s
    exchanged_s = 32 * 2 * 1000 * 4096 * 2 / 450e9
    assert two.roofline.ttft_s == pytest.approx(one.roofline.ttft_s / 2 + exchanged_s, rel=1e-12)
    assert two.expected.tpot_s > one.expected.tpot_s / 2  # launches are not shared


def test_devices_without_a_known_link():
    found = predict(LLAMA3, FP16, replace(gpu("h100-sxm"), interconnect_bytes_per_s=None), n_gpus=4)
    assert found.missing == ("interconnect_bytes_per_s",)
    assert found.roofline.ttft_s == pytest.approx(predict(LLAMA3, FP16, "h100-sxm").roofline.ttft_s / 4, rel=1e-12)


@pytest.mark.parametrize("n_gpus", [0, -1, 3, 64, 1.5, True])
def test_heads_must_be_shared_out_evenly(n_gpus):
    with pytest.raises(InputError, match="n_gpus is"):
        predict(LLAMA3, FP16, "h100-sxm", n_gpus=n_gpus)


@pytest.mark.parametrize("engine", ["vllm 0.7", "llama.cpp unfused"])
def test_a_run_and_the_closed_form_expect_the_same(engine):
    config = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24, vocab_size=33, sliding_window=5)
    with Ledger() as ledger:
        generate(Transformer.shape_only(config), no_tokens((2, 7)), 4)
    options = {"n_prompt": 7, "n_output": 4, "batch": 2, "engine": engine, "n_gpus": 2}
    run = predict_from(ledger, "a100-sxm-80gb", config=config, precision=FP16, **options)
    assert run.expected == predict(config, FP16, "a100-sxm-80gb", **options).expected


def test_positions_of_arguments():
    by_position = predict(LLAMA3, FP16, "h100-sxm", 100, 10, 2, 5, "vllm", 2, "fp8")
    by_name = predict(LLAMA3, FP16, "h100-sxm", n_prompt=100, n_output=10, batch=2, n_cached=5, engine="vllm", n_gpus=2, compute="fp8")
    assert by_position == by_name


def test_doctests():
    assert doctest.testmod(engines).failed == 0
    assert costmodel.engine("generic", "Apple").name == "generic"
    assert isinstance(gpu("h100-sxm"), GPU)
