"""tools/trace.py as its users meet it: what it prints, what its JSON holds, and how it refuses what it cannot use.

Where the process itself is at stake (exit status, streams, the README's words) it is started as one; elsewhere its
`main` is called in this process, which is the same program without the start.
"""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import costmodel
import npinfer
from costmodel import formulas, host
from npinfer import Counts, Precision
from npinfer.compare import logits_error
from test_host import RATES

REPO = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
TOOL = REPO / "tools" / "trace.py"
README = (REPO / "README.md").read_text(encoding="utf-8")
TINY = ("--layers", "2", "--d-model", "32", "--heads", "4", "--kv-heads", "2", "--vocab", "50")
SHORT = ("--prompt-tokens", "5", "--output-tokens", "4")


# A process of its own imports the packages that are under test here, installed or not.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(npinfer.__file__).parent.parent)}


def start(*arguments):
    """Run Python with these arguments as a process of its own, and wait."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def tool():
    """The modules of the program: `trace` (not to be mixed up with the standard library's), `common`, `trace_text`."""
    sys.path.insert(0, str(TOOL.parent))
    try:
        spec = importlib.util.spec_from_file_location("tools_trace", TOOL)
        trace = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(trace)
        import common
        import trace_text

        yield SimpleNamespace(trace=trace, common=common, trace_text=trace_text)
    finally:
        sys.path.remove(str(TOOL.parent))


@pytest.fixture
def run(tool, monkeypatch, capsys):
    """A function that runs the program with these arguments in this process: exit status and both streams."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trace.py", *map(str, arguments)])
        status = 0
        try:
            tool.common.run(tool.trace.main)
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def printed(run):
    """A function that runs the program, which succeeds, and gives what it prints."""

    def printed(*arguments):
        result = run(*arguments)
        assert result.status == 0, result.err
        return result.out

    return printed


@pytest.fixture
def report(printed):
    """A function that runs the program with --format json and gives the object it prints."""
    return lambda *arguments: json.loads(printed("--format", "json", *arguments))


# ---- the main job


def test_the_main_job_prints_its_anchors():
    result = start(TOOL)
    assert result.returncode == 0
    assert result.stderr == ""
    for anchor in (
        "mistral-7b (shape-only): 32 layers, d_model 4096, 32 heads, 8 KV heads of 128, d_ff 14336, vocab 32000",
        "prompt 1000, output 100, batch 1; weights fp16, KV fp16, activations fp16",
        "7,241,732,096", "7,110,660,096", "131,072", "14.22 GB", "86.09 ms", "14.25 ms", "143.48 ms", "14.11 ms", "rtx-4090",
        "compute, bandwidth", "ledger and closed form agree",
    ):  # fmt: skip
        assert anchor in result.stdout
    assert result.stdout.isascii()
    assert not [line for line in result.stdout.splitlines() if line != line.rstrip()]


def readme_command():
    """Arguments of the README's first command."""
    (command, *_) = [line for line in README.splitlines() if line.startswith("    ") and "tools/trace.py" in line]
    return shlex.split(command.partition("tools/trace.py")[2])


def test_the_readme_shows_what_its_first_command_prints():
    shown = README.split("```\n")[1]
    assert start(TOOL, *readme_command()).stdout == shown


def test_the_readme_command_is_the_default_spelt_out(printed):
    assert readme_command() == ["--layers", "32", "--kv-heads", "8"]
    assert printed(*readme_command()) == printed()


def test_the_python_of_the_readme_prints_what_its_comments_say():
    block = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    promised = re.findall(r"^ *print\(.*\) +# ([^:\n]+)", block, re.MULTILINE)
    assert len(promised) >= 5
    result = start("-c", block)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == len(promised)
    for line, promise in zip(lines, promised):
        digits = promise.strip()
        assert line.startswith(digits.removesuffix("...")) if digits.endswith("...") else line == digits


def test_every_command_of_the_readme_is_accepted(tool):
    commands = re.findall(r"^    \S+ tools/trace\.py ?(.*?)(?: +#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        if "--help" not in command:
            tool.trace.parser().parse_args(shlex.split(command))
    assert "usage: trace.py" in start(TOOL, "--help").stdout


def test_its_help_names_the_formats_that_it_takes(tool, run):
    known = run("--weights", "fp3").err.partition("known: ")[2].strip()
    help_ = " ".join(tool.trace.parser().format_help().split())
    assert "mxfp4" in known and f"--weights FORMAT {known.replace(', ', ' ')} --kv FORMAT" in help_


def test_the_examples_of_its_help_are_accepted(tool):
    commands = re.findall(r"^ +python tools/trace\.py (.*)$", tool.trace.__doc__, re.MULTILINE)
    assert commands
    for command in commands:
        tool.trace.parser().parse_args(shlex.split(command))


# ---- JSON


COUNTS = set(Counts._fields)
LEVEL = {"ttft_s", "tpot_s", "latency_s", "latency_exact_s", "tokens_per_s", "prefill_bound", "decode_bound"}
SCHEMA = {
    "": {
        "schema", "mode", "model", "request", "precision", "memory", "counts", "operations", "closed_form", "predictions",
        "prefix", "session", "measured",
    },
    "model": {
        "name", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_parameters",
        "n_streamed_parameters",
    },
    "request": {"batch", "prompt_tokens", "output_tokens", "prefix_tokens"},
    "precision": {"weights", "kv", "activations"},
    "memory": {"weight_bytes_resident", "weight_bytes_streamed", "kv_bytes_per_token", "kv_bytes"},
    "counts": {"prefill", "decode", "decode_first_step", "decode_last_step"},
    "counts.prefill": COUNTS,
    "counts.decode": COUNTS,
    "counts.decode_first_step": COUNTS,
    "counts.decode_last_step": COUNTS,
    "operations.0": {"phase", "op", "calls"} | COUNTS,
    "closed_form": {"agrees"},
    "predictions.0": {"gpu", "fits", "floor", "roofline", "expected", "rough"},
    "predictions.0.floor": LEVEL,
    "predictions.0.roofline": LEVEL,
    "predictions.0.rough": {
        "ttft_s", "tpot_s", "tpot_compute_s", "tpot_bandwidth_s", "prefill_flops", "decode_flops",
    },
}  # fmt: skip


def at(result, path):
    for key in path.split(".") if path else []:
        result = result[int(key) if key.isdigit() else key]
    return result


@pytest.mark.parametrize("path", SCHEMA)
def test_json_has_every_key_of_its_schema(report, path):
    assert SCHEMA[path] <= at(report(), path).keys()


def test_json_figures_of_the_main_job(report):
    result = report(*readme_command())
    assert result["schema"] == "npinfer-trace/1"
    assert result["mode"] == "shape-only"
    assert result["model"]["name"] == "mistral-7b"
    assert result["model"]["n_parameters"] == 7_241_732_096
    assert result["model"]["n_streamed_parameters"] == 7_110_660_096
    assert result["request"] == {"batch": 1, "prompt_tokens": 1000, "output_tokens": 100, "prefix_tokens": 0}
    assert result["precision"] == {"weights": "fp16", "kv": "fp16", "activations": "fp16"}
    assert result["memory"] == {
        "weight_bytes_resident": 2 * 7_241_732_096, "weight_bytes_streamed": 14_221_320_192,
        "kv_bytes_per_token": 131_072, "kv_bytes": 1099 * 131_072,
    }  # fmt: skip
    counts = result["counts"]
    assert counts["prefill"]["matmul_flops"] == 14_483_193_856_000
    assert counts["prefill"]["masked_flops"] == 261_881_856_000
    assert counts["decode_first_step"]["matmul_flops"] == 14_745_600_000
    assert counts["decode_first_step"]["weight_bytes_read"] == 14_221_320_192 + 8192
    assert counts["decode_first_step"]["kv_bytes_read"] == 1001 * 131_072
    assert counts["decode_last_step"]["kv_bytes_read"] == 1099 * 131_072
    assert counts["decode"]["kv_bytes_read"] == sum(range(1001, 1100)) * 131_072
    assert result["closed_form"] == {"agrees": True}
    assert result["prefix"] is result["session"] is result["measured"] is None
    (prediction,) = result["predictions"]
    assert (prediction["gpu"], prediction["fits"], prediction["n_gpus"]) == ("rtx-4090", True, 1)
    assert round(prediction["floor"]["ttft_s"], 5) == 0.08609
    assert round(prediction["floor"]["tpot_s"], 5) == 0.01425
    assert (prediction["floor"]["prefill_bound"], prediction["floor"]["decode_bound"]) == ("compute", "bandwidth")
    assert round(prediction["rough"]["tpot_bandwidth_s"], 5) == 0.01411


def test_json_of_published_figures_on_two_devices(report):
    predictions = report("--model", "llama-3-8b", "--gpu", "a100-sxm-80gb", "--gpu", "h100-sxm")["predictions"]
    assert [prediction["gpu"] for prediction in predictions] == ["a100-sxm-80gb", "h100-sxm"]
    times = [(prediction["floor"]["ttft_s"], prediction["floor"]["tpot_s"]) for prediction in predictions]
    assert [(round(ttft * 1e3, 2), round(tpot * 1e3, 2)) for ttft, tpot in times] == [(45.58, 7.43), (14.37, 4.52)]


def leaves(value, name=""):
    """(name, value) of all that is no object or list, under the name of its nearest key."""
    children = value.items() if isinstance(value, dict) else [(name, child) for child in value]
    for key, child in children:
        if isinstance(child, dict | list):
            yield from leaves(child, key)
        else:
            yield key, child


def test_json_integers_are_integers_and_times_are_seconds(report):
    texts = {"schema", "mode", "name", "weights", "kv", "activations", "phase", "op", "gpu", "compute", "engine", "date"}
    for name, value in leaves(report("--numeric", *TINY, *SHORT)):
        if value is None:
            assert name not in COUNTS
        elif name in texts or name.endswith("_bound"):
            assert isinstance(value, str)
        elif isinstance(value, bool):
            assert name in {"agrees", "fits", "floor_applies", "tie_embeddings", "qkv_bias", "o_bias", "mlp_bias"}
        elif name.endswith(("_s", "_per_byte", "_error")) or name in {"eta", "rope_theta", "norm_eps"} or name.startswith("error_"):
            assert type(value) is float and math.isfinite(value)
        else:
            assert type(value) is int, name


def test_json_parts_add_up(report):
    result = report("--batch", "2", "--output-tokens", "7", "--detail", "step")
    for phase in ("prefill", "decode"):
        for field in Counts._fields:
            total = result["counts"][phase][field]
            assert sum(row[field] for row in result["operations"] if row["phase"] == phase) == total
            assert sum(row[field] for row in result["steps"] if row["phase"] == phase) == total
    assert [row["step"] for row in result["steps"]] == list(range(7))
    assert {field: result["steps"][1][field] for field in COUNTS} == result["counts"]["decode_first_step"]
    assert {field: result["steps"][-1][field] for field in COUNTS} == result["counts"]["decode_last_step"]
    calls = {(row["phase"], row["op"]): row["calls"] for row in result["operations"]}
    assert calls["prefill", "q_proj"] == 32
    assert calls["decode", "rope"] == 2 * 32 * 6
    assert calls["decode", "lm_head"] == 6
    assert calls["prefill", "sample"] == 1


def test_explanations_and_advice_are_there_when_asked_for(report, printed):
    result = report(*TINY, *SHORT)
    assert result["explain"] is None and result["advice"] is None
    asked = report(*TINY, *SHORT, "--explain", "--advise", "--gpu", "rtx-4090", "--gpu", "gtx-1080-ti")
    assert asked["advice"].keys() == {"rtx-4090", "gtx-1080-ti"}
    by_name = {line["name"]: line["value"] for line in asked["explain"] if line["gpu"] in (None, "rtx-4090")}
    assert by_name["n_parameters"] == asked["model"]["n_parameters"]
    assert {name: by_name[name] for name in asked["memory"]} == asked["memory"]
    for phase in ("prefill", "decode"):
        for field in ("matmul_flops", "weight_bytes_read", "kv_bytes_read", "kv_bytes_written"):
            assert by_name[f"{phase}_{field}"] == asked["counts"][phase][field]
    first = asked["predictions"][0]
    assert by_name["ttft_floor_s"] == first["floor"]["ttft_s"]
    assert asked["advice"]["rtx-4090"]["now"]["roofline"].items() >= first["roofline"].items()


def test_the_textbook_s_line_and_what_comes_first_are_printed(printed):
    text = printed("--explain", "--advise")
    assert "kv_bytes_per_token = 2 x n_layers x n_kv_heads x head_dim x 2 B = 2 x 32 x 8 x 128 x 2 = 131,072 B  (section 4.2)" in text
    assert "advice, rtx-4090: int4 weights first: it saves 1.04 s (69%), because the decode takes 94% of the time" in text
    assert "next turn, of 2100 tokens" in text and "throughput, batch 8: 5.34 times as much" in text
    assert text.isascii()
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("arguments, verdict", [
    ((), "5.34 times as much done in a second, by"),
    (("--prompt-tokens", 8000, "--output-tokens", 1), "1.00 times as much done in a second, no gain"),
    (("--gpu", "rtx-3060"), "4.10 times as much done in a second if it did fit"),
    (("--gpu", "apple-m1-8-core-gpu-8gb", "--output-tokens", 1), "not known without the missing rate, by"),
])  # fmt: skip
def test_a_batch_is_no_gain_that_is_none(printed, arguments, verdict):
    assert f"throughput, batch 8: {verdict}" in printed("--advise", *arguments)


@pytest.mark.parametrize("arguments", [
    ("--output-tokens", 1), ("--prompt-tokens", 1), ("--batch", 64, "--gpu", "rtx-3060"), ("--gpu", "gtx-1080-ti"),
    ("--model", "mistral-7b-v0.1", "--prompt-tokens", 5000, "--gpu", "rtx-3050-6gb"), (*TINY, *SHORT),
    ("--gpu", "gtx-1080-ti", "--output-tokens", 1), ("--weights", "int4", "--kv", "int8"),
])  # fmt: skip
def test_advice_has_one_sentence_on_top_of_any_request(printed, arguments):
    text = printed("--advise", "--explain", *arguments)
    (line,) = [line for line in text.splitlines() if line.startswith("advice, ")]
    assert line.endswith(".")
    assert ("does not fit" in line) == ("does not fit, " in text.rpartition("ledger and closed form")[2])
    assert "None" not in text and "nan" not in text


def test_json_layers_add_up(report):
    result = report("--detail", "layer", "--layers", "3", *SHORT)
    for phase in ("prefill", "decode"):
        rows = [row for row in result["layers"] if row["phase"] == phase]
        assert sorted(row["layer"] for row in rows if row["layer"] is not None) == [0, 1, 2]
        for field in Counts._fields:
            assert sum(row[field] for row in rows) == result["counts"][phase][field]


def test_json_of_one_output_token(report):
    result = report("--output-tokens", "1")
    counts, floor = result["counts"], result["predictions"][0]["floor"]
    assert counts["decode"] == dict.fromkeys(Counts._fields, 0)
    assert counts["decode_first_step"] is counts["decode_last_step"] is None
    assert floor["tpot_s"] is floor["latency_s"] is floor["tokens_per_s"] is None
    assert floor["latency_exact_s"] == floor["ttft_s"]
    assert result["memory"]["kv_bytes"] == 1000 * 131_072


# ---- tables


def test_a_column_for_each_gpu(printed):
    text = printed("--gpu", "rtx-4090", "--gpu", "h100-sxm", "--gpu", "apple-m2-ultra-76-core-gpu")
    (header,) = re.findall(r"^level.*$", text, re.MULTILINE)
    assert header.split() == ["level", "rtx-4090", "h100-sxm", "apple-m2-ultra-76-core-gpu-64gb"]
    (ttft,) = re.findall(r"^floor +TTFT +(.*)$", text, re.MULTILINE)
    assert ttft.split("  ")[0] == "86.09 ms" and ttft.split()[-1] == "-"
    assert re.search(r"^apple-m2-ultra-76-core-gpu-64gb: the profile lacks matmul_flops_per_s\.fp16", text, re.MULTILINE)


def test_what_does_not_fit_is_said(printed):
    text = printed("--model", "llama-2-70b")
    assert re.search(r"^rtx-4090: does not fit, 138\.\d\d GB needed of 24\.00 GB", text, re.MULTILINE)
    assert re.search(r"longest context +none$", text, re.MULTILINE)


def test_what_the_cache_may_hold_is_said(printed):
    assert "the bandwidth floor does not apply" in printed(*TINY)
    assert "does not apply" not in printed()


def test_a_context_beyond_the_trained_one_is_said(printed):
    assert "beyond the 2048 positions" in printed("--model", "tinyllama-1.1b", "--prompt-tokens", "3000")
    assert "beyond" not in printed("--model", "tinyllama-1.1b")


def test_a_window_is_said(printed):
    assert "vocab 32000, window 4096" in printed("--model", "mistral-7b-v0.1")


def test_a_disagreement_would_be_said(tool, report):
    result = report(*TINY)
    result["closed_form"]["agrees"] = False
    assert "ledger and closed form DISAGREE" in tool.trace_text.as_text(result, "phase")


def test_one_output_token_has_no_decode(printed):
    text = printed("--output-tokens", "1")
    assert "decode," not in text
    assert re.search(r"^ +TPOT +-$", text, re.MULTILINE)


def test_detail_by_operation(printed):
    text = printed("--detail", "op")
    operations = re.findall(r"^(prefill|decode) +(\w+) +([\d,]+) ", text, re.MULTILINE)
    names = [name for phase, name, _ in operations if phase == "prefill"]
    assert names == [name for phase, name, _ in operations if phase == "decode"]
    assert {"embed", "q_proj", "kv_append", "attn_scores", "softmax", "lm_head", "sample"} <= set(names)
    assert ("prefill", "q_proj", "32") in operations
    assert ("decode", "q_proj", str(32 * 99)) in operations


def test_detail_by_layer(printed):
    text = printed("--detail", "layer", "--layers", "3", *SHORT)
    rows = re.findall(r"^(prefill|decode) +(-|\d+) ", text, re.MULTILINE)
    assert sorted(rows) == sorted((phase, layer) for phase in ("prefill", "decode") for layer in "-012")


def test_detail_by_step(printed):
    text = printed("--detail", "step", *SHORT)
    rows = re.findall(r"^(prefill|decode) +(\d+) ", text, re.MULTILINE)
    assert rows == [("prefill", "0"), ("decode", "1"), ("decode", "2"), ("decode", "3")]


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0, "FLOP", "0 FLOP"), (999, "B", "999 B"), (1000, "B", "1.00 kB"), (2**30, "B", "1.07 GB"), (10**9, "B", "1.00 GB"),
        (14_221_320_192, "B", "14.22 GB"), (14_483_193_856_000, "FLOP", "14.48 TFLOP"), (10**18, "FLOP", "1000.00 PFLOP"),
        (None, "B", "-"),
    ],
)  # fmt: skip
def test_units_are_powers_of_1000(tool, value, unit, text):
    """Case 51: GB is 1e9 bytes, and the unit that is printed is the one that was computed."""
    assert tool.common.scaled(value, unit) == text


@pytest.mark.parametrize(
    "value, text",
    [(1.5, "1.50 s"), (0.08609, "86.09 ms"), (1e-3, "1.00 ms"), (5e-6, "5.00 us"), (2e-9, "2.00 ns"), (None, "-")],
)
def test_times_have_the_unit_that_suits_them(tool, value, text):
    assert tool.common.seconds(value) == text


# ---- where the shape comes from, and its formats


def test_single_dimensions_take_the_place_of_the_models(report):
    model = report("--layers", "2", "--d-model", "512", "--heads", "8", "--vocab", "100")["model"]
    fields = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size")
    assert [model[field] for field in fields] == [2, 512, 8, 8, 64, 1792, 100]  # d_ff 14336 * 512 / 4096
    assert report("--head-dim", "64")["model"]["head_dim"] == 64
    assert report("--d-ff", "11008")["model"]["d_ff"] == 11008


def test_a_config_file(report):
    path = GOLDEN / "mistral-window" / "config.json"
    result = report("--config", path)
    assert result["model"]["sliding_window"] == 8
    assert result["model"]["n_parameters"] == 34272
    assert result["model"]["name"] == "mistral-window"
    assert report("--config", path.parent)["model"] == result["model"]
    assert report("--config", path, "--layers", "5")["model"]["n_layers"] == 5


@pytest.mark.parametrize("case, stored", [("llama-gqa", "fp32"), ("llama-bf16-sharded", "bf16"), ("mistral-window", "fp32")])
def test_a_checkpoint_counts_the_same_with_and_without_numbers(report, case, stored):
    arguments = ("--checkpoint", GOLDEN / case, *SHORT, "--batch", "2", "--detail", "step")
    shapes, numeric = report(*arguments), report(*arguments, "--numeric")
    assert (shapes.pop("mode"), numeric.pop("mode")) == ("shape-only", "numeric")
    assert shapes.pop("measured") is None
    assert numeric.pop("measured").keys() == {"ttft_s", "tpot_s", "peak_memory_bytes"}
    assert shapes == numeric
    assert shapes["precision"] == {"weights": stored, "kv": "fp32", "activations": "fp32"}
    assert shapes["closed_form"] == {"agrees": True}


def test_a_checkpoint_in_other_formats(report):
    arguments = ("--checkpoint", GOLDEN / "llama-gqa", "--weights", "int8", "--kv", "bf16", *SHORT)
    for mode in ([], ["--numeric"]):
        result = report(*arguments, *mode)
        assert result["precision"] == {"weights": "int8", "kv": "bf16", "activations": "fp32"}
        assert result["closed_form"] == {"agrees": True}


@pytest.mark.parametrize("weights, kv", [("fp32", "fp32"), ("int8", "int8"), ("int4", "fp8"), ("fp8", "bf16")])
def test_storage_formats(report, weights, kv):
    result = report("--weights", weights, "--kv", kv)
    precision = Precision(weights=weights, kv=kv)
    config = npinfer.preset("mistral-7b")
    assert result["memory"]["weight_bytes_resident"] == formulas.weight_bytes(config, precision)
    assert result["memory"]["kv_bytes_per_token"] == formulas.kv_bytes_per_token(config, precision)
    assert result["closed_form"] == {"agrees": True}


def test_bits_of_a_mixed_format(report, printed):
    result = report("--bits-per-weight", "4.83")
    # Of the matrices, rounded up to whole bytes for each; the 65 gains of 4,096 at 16 bits.
    matrices = 7_241_732_096 - 65 * 4096
    assert result["memory"]["weight_bytes_resident"] == pytest.approx(matrices * 4.83 / 8 + 2 * 65 * 4096, abs=300)
    assert result["precision"]["bits_per_weight"] == 4.83
    assert result["closed_form"] == {"agrees": True}
    assert "(matrices 4.83 bits)" in printed("--bits-per-weight", "4.83")


def test_a_compute_format(report):
    def ttft_s(*arguments):
        return report(*arguments)["predictions"][0]["floor"]["ttft_s"]

    assert ttft_s("--compute", "fp16-fp16acc") == pytest.approx(ttft_s() / 2, rel=1e-3)
    assert report("--compute", "int8")["predictions"][0]["compute"] == "int8"


def test_a_profile_of_ones_own(report, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("memory_bytes = 24e9\nmemory_bytes_per_s = 1008e9\nmatmul_flops_per_s = { fp16 = 165.2e12 }\n")
    (prediction,) = report("--gpu", path)["predictions"]
    assert prediction["gpu"] == "mine"
    assert prediction["missing_rates"] == ["vector_flops_per_s"]
    assert round(prediction["floor"]["ttft_s"], 5) == 0.08609


# ---- numeric runs


def test_a_numeric_run_measures_and_states_its_memory_first():
    result = start(TOOL, "--numeric", *TINY, *SHORT)
    assert result.returncode == 0
    assert re.fullmatch(r"numeric run: needs about \d+\.\d\d GB of memory\n", result.stderr)  # no progress: no terminal
    assert "(numeric)" in result.stdout
    assert re.search(r"^measured +TTFT [\d.]+ [mun]?s +TPOT [\d.]+ [mun]?s$", result.stdout, re.MULTILINE)
    assert "ledger and closed form agree" in result.stdout


def test_a_numeric_run_counts_the_same_as_a_shape_only_one(report):
    arguments = (*TINY, *SHORT, "--batch", "3", "--seed", "7")
    numeric, shapes = report(*arguments, "--numeric"), report(*arguments)
    for key in ("model", "request", "precision", "memory", "counts", "operations", "closed_form", "predictions"):
        assert numeric[key] == shapes[key]
    measured = numeric["measured"]
    assert measured["ttft_s"] > 0 and measured["tpot_s"] > 0
    assert measured["peak_memory_bytes"] is None or measured["peak_memory_bytes"] > 10**7


def test_one_token_of_a_numeric_run_has_no_measured_tpot(report):
    measured = report("--numeric", *TINY, "--prompt-tokens", "5", "--output-tokens", "1")["measured"]
    assert measured["ttft_s"] > 0
    assert measured["tpot_s"] is None


def test_progress_is_shown_on_a_terminal_only(tool, monkeypatch, capsys):
    for terminal, expected in [(False, ""), (True, "\rtoken 1/2\rtoken 2/2\n")]:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        progress = tool.common.Progress("token", 2)
        progress()
        progress()
        assert capsys.readouterr().err == expected


# ---- lists, files, pipes


def test_lists(printed):
    assert printed("--list-gpus").split() == costmodel.gpus()
    assert printed("--list-models").split() == npinfer.presets()


def test_version(run):
    declared = ConfigParser()
    declared.read(REPO / "setup.cfg")
    result = run("--version")
    try:
        installed = version("npinfer")
    except PackageNotFoundError:  # run from a checkout: it says so, in one line
        assert result.status == 2
        assert len(result.err.splitlines()) == 1
    else:
        assert result.out == f"npinfer {installed}\n"
        assert installed == declared["metadata"]["version"]


@pytest.mark.parametrize("arguments", [(), ("--format", "json"), ("--list-models",)])
def test_output_goes_to_a_file(printed, tmp_path, arguments):
    path = tmp_path / "trace.txt"
    path.write_text("what was there before")
    assert printed(*arguments, "--output", path) == ""
    assert path.read_text() == printed(*arguments)
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_run_leaves_the_output_file_alone(run, tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("what was there before")
    assert run("--output", path, "--layers", "0").status == 2
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_output_in_place_of_a_folder_leaves_nothing_behind(run, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    result = run("--output", folder)
    assert result.status == 2
    assert str(folder) in result.err
    assert list(tmp_path.iterdir()) == [folder]


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, TOOL, "--list-gpus"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


# ---- bad input


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of files that cannot be used."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "broken.json").write_text('{"model_type": "llama",')
    (folder / "bert.json").write_text('{"model_type": "bert"}')
    (folder / "list.json").write_text("[]")
    (folder / "broken.toml").write_text("memory_bytes = \n")
    (folder / "gigabytes.toml").write_text("memory_bytes = 24\nmemory_bytes_per_s = 1008e9\n")
    (folder / "unknown-key.toml").write_text("memory_bytes = 24e9\nmemory_bytes_per_s = 1008e9\nbandwidth = 1\n")
    (folder / "empty").mkdir()
    truncated = shutil.copytree(GOLDEN / "llama-gqa", folder / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    shutil.copytree(GOLDEN / "llama-bf16-sharded", folder / "shardless")
    (folder / "shardless" / "model-00001-of-00002.safetensors").unlink()
    other = shutil.copytree(GOLDEN / "llama-gqa", folder / "other")
    shutil.copy(GOLDEN / "llama-mqa-bias" / "config.json", other / "config.json")
    return folder


# The arguments, FILES the folder of unusable files; and what the message says.
BAD = [
    # numbers
    ("--engine vlm", "no engine 'vlm'; known: generic, vllm"), ("--gpus 3", "n_gpus is 3, expected a divisor of the 32 heads"),
    ("--gpus 0", "n_gpus is 0, expected"),
    ("--layers 0", "n_layers is 0, expected from 1"),
    ("--layers -3", "n_layers is -3, expected from 1"),
    ("--layers 99999999999", "n_layers is 99999999999, expected from 1"),
    ("--d-model 0", "d_model is 0, expected from 1"),
    ("--d-model 4294967296", "4294967296"),
    ("--d-ff -1", "d_ff is -1"),
    ("--vocab 0", "vocab_size is 0"),
    ("--heads 0", "n_heads is 0"),
    ("--kv-heads 5", "n_heads is 32, expected a multiple of n_kv_heads 5"),
    ("--kv-heads 64", "n_heads is 32, expected a multiple of n_kv_heads 64"),
    ("--head-dim 7", "head_dim is 7, expected an even number"),
    ("--heads 24 --kv-heads 8", "d_model 4096 is not a multiple of n_heads 24; give head_dim (--head-dim)"),
    ("--d-model 4097", "not whole at d_model 4097; give d_ff (--d-ff)"),
    ("--prompt-tokens 0", "prompt tokens is 0, expected from 1"),
    ("--prompt-tokens -5", "prompt tokens is -5"),
    ("--prompt-tokens abc", "argument --prompt-tokens: invalid int value: 'abc'"),
    ("--prompt-tokens 1.5", "invalid int value: '1.5'"),
    ("--prompt-tokens 99999999999", "prompt tokens is 99999999999"),
    ("--prompt-tokens", "argument --prompt-tokens: expected one argument"),
    ("--output-tokens 0", "output tokens is 0, expected from 1"),
    ("--output-tokens -1", "output tokens is -1"),
    ("--output-tokens 999999999", "--output-tokens is 999999999, expected at most 131072"),
    ("--batch 0", "batch is 0, expected from 1"),
    ("--batch -1", "batch is -1"),
    ("--batch ten", "argument --batch: invalid int value: 'ten'"),
    ("--bits-per-weight 0", "bits_per_weight is 0.0, expected a number above 0"),
    ("--bits-per-weight nan", "bits_per_weight is nan"),
    ("--bits-per-weight 65", "bits_per_weight is 65.0"),
    ("--bits-per-weight four", "invalid float value: 'four'"),
    # names
    ("--model mistral-7B", "no model 'mistral-7B'; known: mistral-7b"),
    ("--gpu rtx-4091", "no GPU 'rtx-4091'; known:"),
    ("--gpu rtx-4090 --gpu nothing", "no GPU 'nothing'"),
    ("--weights fp12", "no weights format 'fp12'; known: fp32, fp16, bf16, fp8, int8, int4"),
    ("--kv int4", "no kv format 'int4'; known:"),
    ("--activations int8", "no activations format 'int8'; known:"),
    ("--compute fp15", "no compute format 'fp15'; known:"),
    ("--format yaml", "invalid choice: 'yaml'"),
    ("--detail token", "invalid choice: 'token'"),
    # flags
    ("--layer 3", "unrecognized arguments: --layer 3"),
    ("--frobnicate", "unrecognized arguments: --frobnicate"),
    ("trace", "unrecognized arguments: trace"),
    ("--model mistral-7b --config config.json", "not allowed with argument --model"),
    ("--config a --checkpoint b", "not allowed with argument --config"),
    # files
    ("--config FILES/missing.json", "missing.json: cannot be read (No such file or directory)"),
    ("--config FILES/broken.json", "broken.json: is not JSON"),
    ("--config FILES/list.json", "list.json: holds list, expected a JSON object"),
    ("--config FILES/bert.json", "model_type is 'bert', which is not supported; supported: llama, mistral"),
    ("--config FILES/empty", "config.json: cannot be read"),
    ("--gpu FILES/missing.toml", "missing.toml: cannot be read (No such file or directory)"),
    ("--gpu FILES/broken.toml", "broken.toml: is not TOML"),
    ("--gpu FILES/gigabytes.toml", "memory_bytes is 24, expected bytes; did you mean 24e9?"),
    ("--gpu FILES/unknown-key.toml", "unknown key 'bandwidth'; known:"),
    ("--checkpoint FILES/missing", "missing: cannot be read (No such file or directory)"),
    ("--checkpoint FILES/empty", "empty/config.json: cannot be read"),
    ("--checkpoint FILES/truncated", "incomplete, download it again"),
    ("--checkpoint FILES/shardless", "model-00001-of-00002.safetensors"),
    ("--checkpoint FILES/other", "tensors of the config are missing, first"),
    ("--output FILES/missing/trace.txt", "missing/trace.txt: cannot be written (No such file or directory)"),
    ("--list-gpus --output FILES/missing/trace.txt", "cannot be written"),
    # what cannot be run on real arrays
    ("--numeric --weights fp8", "weights format 'fp8' is shape-only; a numeric run holds fp32, fp16, bf16, int8, int4"),
    ("--numeric --kv fp8", "kv format 'fp8' is shape-only; a numeric run holds fp32, fp16, bf16, int8"),
    ("--logits-error", "--logits-error compares logits, which only a numeric run has; add --numeric"),
    ("--numeric --bits-per-weight 4.83", "bits_per_weight is an average without values"),
    ("--numeric --layers 60000", "GB is available; leave out --numeric"),
    ("--numeric TINY --prompt-tokens 2000000000", "GB is available; leave out --numeric"),
    ("--numeric TINY --prompt-tokens 0", "prompt tokens is 0, expected from 1"),
    ("--numeric TINY --output-tokens 0", "output tokens is 0, expected from 1"),
    ("--numeric TINY --batch -1", "batch is -1, expected from 1"),
    ("--numeric TINY --seed -1", "seed"),
    ("--numeric --checkpoint GOLDEN/llama-gqa --layers 1", "leave out the dimensions"),
    ("--seed -1", "seed"),
    ("--seed x", "argument --seed: invalid int value: 'x'"),
]


def arguments_of(text, files):
    text = text.replace("TINY", " ".join(TINY)).replace("GOLDEN", shlex.quote(str(GOLDEN)))
    return shlex.split(text.replace("FILES", shlex.quote(str(files))))


def is_refused(result, message):
    assert result.status == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("trace.py: ")
    assert message in result.err


@pytest.mark.parametrize("arguments, message", BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_one_line_and_status_2(run, files, arguments, message):
    is_refused(run(*arguments_of(arguments, files)), message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--layers 99999999999", "n_layers is 99999999999"),
        ("--wat", "unrecognized arguments: --wat"),
        ("--checkpoint FILES/truncated --numeric", "incomplete, download it again"),
    ],
)
def test_bad_input_of_a_process(files, arguments, message):
    result = start(TOOL, *arguments_of(arguments, files))
    is_refused(SimpleNamespace(status=result.returncode, out=result.stdout, err=result.stderr), message)


def test_a_name_with_line_breaks_is_still_one_line(run):
    is_refused(run("--model", "two\nlines"), "two")
    is_refused(run("--two\nlines"), "--two")
    is_refused(run("--gpu", "two\nlines.toml"), "two")


def test_output_to_a_pipe_or_a_link_leaves_them_what_they_are(printed, tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    printed(*TINY, *SHORT, "--output", str(link))
    assert link.is_symlink() and "ledger and closed form agree" in target.read_text()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    printed(*TINY, *SHORT, "--output", str(pipe))
    assert pipe.is_fifo() and b"ledger and closed form agree" in os.read(reader, 2**16)
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


@pytest.mark.parametrize("flag", ["--checkpoint", "--config"])
def test_an_empty_path_is_not_the_default_model(run, flag):
    result = run(flag, "")
    assert result.status == 2 and "cannot be read" in result.err


def test_the_largest_request_is_counted(report):
    result = report(*TINY, "--batch", str(2**31), "--prompt-tokens", str(2**31), "--output-tokens", "2")
    assert result["closed_form"] == {"agrees": True}
    assert result["counts"]["prefill"]["kv_bytes_written"] == 2**62 * result["memory"]["kv_bytes_per_token"]


def test_engine_and_gpus(report, printed):
    flags = ("--model", "llama-3-8b", "--gpu", "h100-sxm", "--engine", "vLLM 0.7.3")
    one, two = report(*flags)["predictions"][0], report(*flags, "--gpus", "2")["predictions"][0]
    assert one["expected"]["basis"]["engine"] == "vllm-0.7"
    assert (two["n_gpus"], two["floor"]["tpot_s"]) == (2, one["floor"]["tpot_s"] / 2)
    low, high = one["expected"]["tpot_range_s"]
    assert low < one["expected"]["tpot_s"] < high
    text = printed(*flags, "--gpus", "2")
    assert "2 x h100-sxm" in text
    assert re.search(r"^expected: engine vllm-0.7, median error .* measurements of decode$", text, re.MULTILINE)


def test_prefix_and_turns(report, printed):
    flags = ("--prompt-tokens", "1400", "--prefix-tokens", "1200", "--turns", "800,1200,1600")
    result = report(*flags, "--gpu", "rtx-4090", "--gpu", "h100-sxm")
    prefix, session = result["prefix"], result["session"]
    assert result["request"]["prefix_tokens"] == prefix["prefix_tokens"] == 1200
    assert prefix["n_computed"] == 200 and round(prefix["needed_flops_share"], 4) == 0.1460
    assert prefix["cold"] == result["counts"]["prefill"]
    assert set(prefix["cold"]) == set(prefix["warm"]) == COUNTS
    assert prefix["ttft_s"]["floor"]["cold"] == result["predictions"][0]["floor"]["ttft_s"]
    assert prefix["ttft_s"]["expected"]["cold"] == result["predictions"][0]["expected"]["ttft_s"]
    assert [(turn["turn"], turn["n_reused"], turn["n_computed"]) for turn in session] == [(1, 0, 800), (2, 800, 400), (3, 1200, 400)]
    assert report(*SHORT)["prefix"] is report(*SHORT)["session"] is None
    text = printed(*flags)
    assert "prefix of 1200 cached: 200 tokens computed, 0.1460 of the needed FLOPs (the textbook's share 0.1429)" in text
    assert re.search(r"^3 +1600 +1200 +400 +23\.68 TFLOP +5\.92 TFLOP", text, re.MULTILINE)


@pytest.mark.parametrize("flags, met", [
    (("--prefix-tokens", "1001"), "--prefix-tokens is 1001, expected from 0 to 1000"),
    (("--prefix-tokens", "-1"), "--prefix-tokens is -1"),
    (("--turns", "800,x"), "--turns is '800,x'"),
    (("--turns", "800,0"), "prompt of turn 2 is 0"),
    (("--turns", ""), "--turns is ''"),
])
def test_bad_prefixes_and_turns(run, flags, met):
    result = run(*flags)
    assert result.status == 2 and met in result.err and len(result.err.splitlines()) == 1


# ---- what a format costs in accuracy


def test_the_logits_error_is_that_of_the_same_prompt_in_fp32(report):
    arguments = ("--d-model", "64", "--heads", "4", "--kv-heads", "2", "--layers", "2", "--vocab", "50", "--numeric", *SHORT)
    config = npinfer.preset("mistral-7b").resized(d_model=64, n_heads=4, n_kv_heads=2, n_layers=2, vocab_size=50)
    n_prompt = int(SHORT[SHORT.index("--prompt-tokens") + 1])
    tokens = np.random.default_rng(0).integers(50, size=(1, n_prompt))
    logits = []
    for weights, kv in (("int4", "int8"), ("fp32", "fp32")):
        model = npinfer.Transformer.random(config, 0, Precision(weights, kv))
        logits.append(model.prefill(tokens, model.new_cache(), all_logits=True))
    error = report(*arguments, "--weights", "int4", "--kv", "int8", "--logits-error")["measured"]["logits_error"]
    assert error == logits_error(*logits)._asdict()
    assert error["n_positions"] == n_prompt and error["relative_rms"] > 0.05
    exact = report(*arguments, "--weights", "fp32", "--kv", "fp32", "--logits-error")["measured"]["logits_error"]
    assert (exact["rms"], exact["same_choice"]) == (0.0, 1.0)


def test_the_logits_error_is_printed(printed):
    text = printed(*TINY, "--numeric", *SHORT, "--logits-error")
    assert re.search(r"logits error +RMS [0-9.e-]+, [0-9.]+% +largest", text)
    assert re.search(r"same choice [0-9.]+% +divergence [0-9.e-]+ nats", text)


def test_a_logits_error_without_a_spread_is_null_and_a_dash(report, printed):
    arguments = (*TINY, "--vocab", "1", "--numeric", *SHORT, "--weights", "int8", "--logits-error")
    error = report(*arguments)["measured"]["logits_error"]
    assert error["rms"] > 0 and error["relative_rms"] is None
    assert re.search(r"logits error +RMS [0-9.e-]+, - +largest", printed(*arguments))


def test_a_numeric_run_stands_beside_what_its_own_engine_was_expected_to_take(printed, tmp_path):
    profile = tmp_path / "host.toml"
    profile.write_text(host.as_profile(RATES, "2026-01-31"), encoding="utf-8")
    fp32 = ["--weights", "fp32", "--kv", "fp32", "--activations", "fp32"]
    arguments = [*TINY, "--prompt-tokens", "5", "--output-tokens", "3", *fp32]
    text = printed("--numeric", *arguments, "--gpu", profile, "--gpu", "rtx-4090")
    ratios = re.findall(r"^ +measured here +[\d.]+ [mun]?s, [\d.]+ times +-$", text, re.MULTILINE)
    assert len(ratios) == 2  # TTFT and TPOT
    assert "measured here" not in printed("--numeric", *arguments)
    assert "measured here" not in printed(*arguments, "--gpu", profile)
    assert "measured here" not in printed("--numeric", *arguments, "--kv", "fp16", "--gpu", profile)
