"""This machine as a device, and the bench: what is made of measured rates, never how large they are."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel
from costmodel import expected, host, interpreter, measure
from npinfer import Experts, Ledger, ModelConfig, Precision, Transformer, preset
from npinfer.generate import no_tokens
from strategies import FP32, any_config

TOOLS = Path(__file__).parent.parent / "tools"
RATES = {
    "memory_bytes": 24 * 10**9,
    "memory_bytes_per_s": 12.5e9,
    "matmul_flops_per_s": {"fp32": 70e9, "fp16": 70e9, "bf16": 70e9},
    "vector_flops_per_s": 1.25e9,
    "last_level_cache_bytes": 32 * 2**20,
    "interpreter": {"operation_s": 2e-5, "product_s": 5e-5, "packing_bytes_per_s": 8e9, "kv_bytes_per_s": 6e9},
    "bandwidths": {2**20: 50e9, 2**29: 12.5e9},
}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "host.toml"
    path.write_text(host.as_profile(RATES, "2026-01-31"), encoding="utf-8")
    return costmodel.gpu(path)


@pytest.fixture
def program(monkeypatch):
    """A function that loads one of the tools."""
    monkeypatch.syspath_prepend(str(TOOLS))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("common", "trace_text"):
        sys.modules.pop(name, None)


def test_a_profile_reads_as_it_was_measured(profile):
    for key, value in RATES.items():
        if key != "bandwidths":
            assert getattr(profile, key) == value
    assert "2026-01-31" in profile.source
    assert "# " in host.as_profile(RATES, "2026-01-31") and "streams 512 MiB at 12.5 GB/s" in host.as_profile(RATES, "")


def test_a_cache_that_the_system_does_not_tell_of_is_left_out(tmp_path):
    path = tmp_path / "host.toml"
    path.write_text(host.as_profile(RATES | {"last_level_cache_bytes": None}, "2026-01-31"), encoding="utf-8")
    assert costmodel.gpu(path).last_level_cache_bytes is None


@given(config=any_config(), n_new=st.integers(1, 4))
def test_operations_are_those_that_a_ledger_has(config, n_new):
    model = Transformer.shape_only(config, FP32)
    with Ledger() as ledger:
        model.prefill(no_tokens((1, n_new)), model.new_cache())
    calls = sum([entry.calls for entry in ledger.entries()])
    shared = 0
    if config.experts and config.experts.n_shared:  # one closed form for them and the chosen ones
        shared = sum([kind.sparse for kind in config.kinds]) * 5  # gate, up, act, down, residual
    mixed = config.experts is not None and len({kind.sparse for kind in config.kinds}) > 1  # a router in some layers only
    routers = sum([not kind.sparse for kind in config.kinds]) if mixed else 0
    n_operations, n_products = expected.n_operations(config, FP32)
    assert n_operations == calls + 1 - shared + routers
    products = sum([entry.calls for entry in ledger.entries() if entry.counts.matmul_flops and entry.counts.weight_bytes_read])
    assert config.experts or n_products == products


def test_each_expert_of_a_token_has_products_of_its_own():
    mixture = ModelConfig(2, 8, 2, 8, 16, experts=Experts(16, 8, 4, n_shared=1, gate="sigmoid", dense_layers=(0,)))
    # A dense layer: q k v o, gate up down.  A sparse one: q k v o, router, 3 for each of 8 experts and for the shared one.
    # The closed form has a router in every layer.
    assert expected.n_operations(mixture, FP32)[1] == (7 + 1) + (4 + 1 + 3 * 9) + 1


# 8 layers of 4 * 512 * 512 + 3 * 512 * 1376 weights, a head of 8192 * 512, 17 norms of 512, 4 bytes each
STREAMED = 4 * (8 * (4 * 512 * 512 + 3 * 512 * 1376) + 8192 * 512 + 17 * 512)
SMALL = ModelConfig(n_layers=8, d_model=512, n_heads=8, d_ff=1376, vocab_size=8192)


def test_the_interpreters_step_is_its_streams_its_products_and_its_operations(profile):
    prediction = costmodel.predict(SMALL, FP32, profile, n_prompt=100, n_output=2)
    # A layer: two norms, q k v o, rope twice, kv_append, three of attention, two residuals, gate up act down; and
    # embed, final_norm, lm_head and sample.
    assert expected.n_operations(SMALL, FP32) == (8 * 18 + 4, 8 * 7 + 1)
    kv_bytes = 8 * 2 * 512 * 4 * (101 + 1)  # 101 positions read, one written
    elementwise_flops = prediction_flops(SMALL, n_cached=100, n_new=1)
    seconds = STREAMED / 12.5e9 + (8 * 7 + 1) * 5e-5 + (8 * 18 + 4) * 2e-5 + kv_bytes / 6e9 + elementwise_flops / 1.25e9
    assert prediction.expected.tpot_s == pytest.approx(seconds, rel=1e-3)  # its one embedding row, 2 KiB, is left out here
    assert (prediction.expected.decode_bound, prediction.expected.basis["engine"]) == ("bandwidth", "npinfer")
    assert (prediction.expected.ttft_range_s, prediction.expected.tpot_range_s) == (None, None)


def test_the_interpreters_prefill_packs_its_weights_and_skips_what_no_query_sees(profile):
    prediction = costmodel.predict(SMALL, FP32, profile, n_prompt=100, n_output=1)
    needed = prediction.prefill.needed_flops
    kv_bytes = 8 * 2 * 512 * 4 * (100 + 100)
    skipped = 8 * 8 * (100 * 99 // 2)  # layers, heads, keys behind each of 100 queries
    elementwise_flops = prediction_flops(SMALL, 0, 100) - 6 * skipped
    seconds = STREAMED / 8e9 + needed / 70e9 + elementwise_flops / 1.25e9 + kv_bytes / 6e9 + (8 * 18 + 4) * 2e-5
    assert prediction.expected.ttft_s == pytest.approx(seconds, rel=1e-3)
    assert prediction.expected.prefill_bound == "compute"


def prediction_flops(config, n_cached, n_new):
    return costmodel.formulas.forward_counts(config, FP32, 1, n_cached, n_new).elementwise_flops + config.vocab_size - 1


def test_tiny_steps_are_bound_by_what_is_around_the_arithmetic(profile):
    tiny = costmodel.predict(replace(SMALL, d_model=8, d_ff=8, vocab_size=8, head_dim=2), FP32, profile, 10, 10)
    assert tiny.expected.prefill_bound == "launches"


@given(n_cached=st.integers(0, 9), n_new=st.integers(1, 9), window=st.none() | st.integers(1, 7), batch=st.integers(1, 3))
def test_skipped_scores_are_those_that_the_mask_throws_away(n_cached, n_new, window, batch):
    config = replace(SMALL, n_layers=2, sliding_window=window)
    counts = costmodel.formulas.forward_counts(config, FP32, batch, n_cached, n_new)
    request = costmodel.predict(config, FP32, "rtx-4090", n_cached + n_new, 1, batch, n_cached)
    work, _ = costmodel.prediction.works(config, FP32, request.prefill, request.decode, n_cached + n_new, 1, batch, n_cached)
    assert 4 * config.head_dim * interpreter.skipped_scores(work) == counts.masked_flops


@pytest.mark.parametrize("line, message", [
    ("interpreter = 3", "interpreter has 3, expected a table of operation_s, product_s"),
    ("interpreter = {}", "interpreter has nothing, expected a table of operation_s"),
    (
        "interpreter = { operation_s = 20, product_s = 5e-5, packing_bytes_per_s = 8e9, kv_bytes_per_s = 6e9 }",
        "operation_s is 20, expected seconds, such as 10e-6; are they us",
    ),
    ("interpreter = { operation_s = 1e-5 }", "interpreter has operation_s, expected a table of operation_s, product_s"),
    (
        "interpreter = { operation_s = 1e-5, product_s = -1, packing_bytes_per_s = 8e9, kv_bytes_per_s = 6e9 }",
        "product_s is -1, expected seconds, positive",
    ),
])
def test_a_profile_whose_interpreter_is_wrong_is_refused(tmp_path, line, message):
    path = tmp_path / "host.toml"
    path.write_text(f"memory_bytes = 24e9\nmemory_bytes_per_s = 12e9\n{line}\n", encoding="utf-8")
    with pytest.raises(costmodel.profiles.ProfileError, match=message):
        costmodel.gpu(path)


def test_the_engine_of_a_device_without_measured_operations_is_not_known():
    prediction = costmodel.predict(preset("mistral-7b"), Precision(), "rtx-4090", engine="npinfer")
    assert (prediction.expected.ttft_s, prediction.expected.tpot_s) == (None, None)


def test_the_interpreter_runs_on_one_machine(profile):
    with pytest.raises(costmodel.profiles.InputError, match="n_gpus is 2, and the interpreter runs on one machine"):
        costmodel.predict(SMALL, FP32, profile, n_gpus=2)


def test_times_that_cannot_be_are_not_made_rates(monkeypatch):
    monkeypatch.setattr(measure, "alternate", lambda *functions, **options: [[1.0]] * len(functions))
    with pytest.raises(costmodel.profiles.InputError, match="attention over many keys took less than its parts"):
        measure.kv_bytes_per_s(n_keys=4, n_few=2)


@pytest.mark.parametrize("precision, shown", [
    ({"weights": "fp32", "kv": "fp32", "activations": "fp32"}, "30.00 ms, 1.50 times"),
    ({"weights": "fp16", "kv": "fp32", "activations": "fp32"}, "-"),
    ({"weights": "q4_1", "kv": "fp32", "activations": "fp32", "exceptions": [["embed", None, "q6_k"]]}, "-"),  # of a GGUF file
])
def test_what_was_measured_is_compared_in_fp32_alone(program, precision, shown):
    result = {"measured": {"ttft_s": 0.03}, "precision": precision}
    expected_here = {"ttft_s": 0.02, "basis": {"engine": "npinfer"}}
    assert program("trace_text")._measured(result, expected_here, "ttft_s") == shown


def test_products_that_a_cache_holds_take_no_time_that_a_profile_refuses(monkeypatch, tmp_path):
    def times_s(*functions, in_a_row=1, **_):  # a step 3.5 s and its products 3; a prefill 4 s and its products 3
        return [[3.5], [3.0]] if in_a_row > 1 else [[4.0], [3.0]][: len(functions)]

    monkeypatch.setattr(measure, "alternate", times_s)
    monkeypatch.setattr(measure, "kv_bytes_per_s", lambda: 6e9)
    rates, vector = measure.interpreter(memory_bytes_per_s=1e6, matmul_flops_per_s=1e15, n_prompt=2)
    assert rates["product_s"] == 1e-9  # 118 s of streaming are not in 3 s of products
    path = tmp_path / "host.toml"
    path.write_text(host.as_profile(RATES | {"interpreter": rates, "vector_flops_per_s": max(vector, 1e9)}, ""), encoding="utf-8")
    assert costmodel.gpu(path).interpreter["product_s"] == 1e-9


def test_times_are_taken_in_turns():
    ran = []
    one, other, before = (lambda: ran.append("a")), (lambda: ran.append("b")), lambda: ran.append(".")
    first, second = measure.alternate(one, other, repeats=3, before=before)
    assert ran == [".", "a"] * 2 + [".", "b"] * 2 + [".", "a", ".", "b"] * 3
    assert len(first) == len(second) == 3 and all(seconds >= 0 for seconds in first + second)
    ran.clear()
    first, second = measure.alternate(one, other, repeats=4, in_a_row=3)
    assert "".join(ran) == "aaabbb" * 3 and len(first) == len(second) == 6
    assert measure.ratio([1.0, 9.0, 2.0], [4.0, 1.0, 2.0]) == 1.0


def test_products_are_all_those_of_a_step():
    config = ModelConfig(n_layers=2, d_model=12, n_heads=2, d_ff=20, vocab_size=30)
    model = Transformer.random(config, precision=FP32)
    n_weights = sum([matrix.rows.size for matrix in measure.matrices(model)])
    with Ledger() as ledger:
        model.decode([0], model.new_cache())
    attention = sum([ledger.total(op=op).matmul_flops for op in ("attn_scores", "attn_mix")])
    assert 2 * n_weights == ledger.total().matmul_flops - attention
    measure.products(model, 3)()


def test_the_bench_has_a_row_for_each_shape(program, monkeypatch, capsys):
    bench = program("bench")
    monkeypatch.setattr(bench, "programs", lambda: {"numpy": 0.1})
    monkeypatch.setattr(bench, "SHAPES", {"16x2": (2, 1, 24, 40)})
    monkeypatch.setattr(bench.measure, "streaming_bytes_per_s", lambda n_bytes: 1e10)
    monkeypatch.setattr(bench.measure, "matmul_flops_per_s", lambda n_rows: 1e11)
    bench.main(["--shapes", "16x2", "--repeats", "1", "--format", "json"])
    result = json.loads(capsys.readouterr().out)
    ratios = result["shapes"]["16x2"]
    assert ratios.keys() >= {"decode_over_matmuls", "prefill_over_matmuls", "ledger_on_over_off", "decode_share_of_bandwidth"}
    assert all(value > 0 for value in ratios.values())
    bench.main(["--shapes", "16x2", "--repeats", "1"])
    assert "decode step / its matrix products" in capsys.readouterr().out


@pytest.mark.parametrize("tool, arguments, message", [
    ("bench", ["--shapes", "3x3"], "no shape '3x3'; known: 288x6"),
    ("bench", ["--repeats", "0"], "--repeats is 0, expected from 1"),
    ("calibrate", ["host", "file.csv"], "host measures this machine and takes neither"),
    ("calibrate", ["engines"], "engines takes a file of measurements"),
    ("calibrate", ["host", "--output", "no/such/host.toml"], "--output no/such/host.toml: cannot be written"),
    ("bench", ["--output", "no/such/table"], "--output no/such/table: cannot be written"),
])
def test_bad_input_is_refused_by_name(program, tool, arguments, message):
    with pytest.raises(costmodel.profiles.InputError, match=message):
        program(tool).main(arguments)
