"""Measurements: rows read from their own columns, errors against errors worked again, what is refused and why."""

import csv
import io
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel import formulas, measurements, predict, validation
from costmodel.measurements import COLUMNS
from costmodel.published import engine_name, gpu_name, model_config, weight_bits
from npinfer import InputError, Precision, preset

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "data" / "measurements-sample.csv"
TOOL = ROOT / "tools" / "validate.py"
ROW = {
    "id": "r1", "model": "Llama-2-7B", "shape": "Llama-2-7B", "quant": "Q4_0", "weight_file_gib": "3.56", "kv_dtype": "f16",
    "device": "NVIDIA GeForce RTX 3090", "n_gpu": "1", "batch": "1", "prompt_tokens": "0", "output_tokens": "128",
    "context_start": "0", "metric": "decode_tok_s", "value": "130", "engine": "llama.cpp", "backend": "CUDA", "quality": "A",
}  # fmt: skip


def write(path, *rows, columns=COLUMNS):
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, columns)
        lines.writeheader()
        lines.writerows(rows)
    return path


@pytest.fixture
def validated(tmp_path):
    """A function from rows to the result of validating them; a good row goes along."""
    return lambda *rows: validation.validate(*measurements.read(write(tmp_path / "rows.csv", ROW, *rows)))


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def sample():
    return validation.validate(*measurements.read(SAMPLE))


# --- reading a row -----------------------------------------------------------------


@pytest.mark.parametrize(("cells", "bits"), [
    ({"weight_file_gib": "3.56"}, 8 * 3.56 * 2**30 / 6_738_415_616),  # 4.54
    ({"weight_file_bytes": "3825065984", "weight_file_gib": "9"}, 8 * 3_825_065_984 / 6_738_415_616),
    ({"bits_per_weight": "8"}, 8.0),
    ({"weight_file_bytes": "13210000000", "note": "model_size 13.21 GB (embedding excluded)"}, 8 * 13.21e9 / (6_738_415_616 - 32_000 * 4096)),
    ({"quant": "bfloat16"}, 16.0), ({"quant": "F16"}, 16.0), ({"quant": "Q8_0"}, 8.5), ({"quant": "Q4_K_M"}, 4.85),
    # 4 bits, and 20 for each group of 128; the two tables of 32000 * 4096 at 16
    ({"quant": "GPTQ 4-bit g128"}, (4.15625 * (6_738_415_616 - 262_144_000) + 16 * 262_144_000) / 6_738_415_616),
])  # fmt: skip
def test_weight_bits_by_the_rows_own_columns(cells, bits):
    row = {"quant": "", **cells}
    assert weight_bits(row, preset("llama-2-7b")) == pytest.approx(bits, rel=1e-12)


def test_experts_in_mxfp4_leave_the_rest_of_the_file_to_the_rest():
    """gpt-oss-20b: of 20,914,757,184 parameters 24 layers * 32 experts * 3 matrices of 2880 * 2880 take 17 bytes for 32."""
    config = preset("gpt-oss-20b")
    row = ROW | {"shape": "gpt-oss-20b", "quant": "MXFP4", "weight_file_gib": "11.27"}
    precision = measurements._measurement(row).precision
    n_experts = 24 * 32 * 3 * 2880 * 2880
    assert precision.bits_per_weight == pytest.approx(
        (8 * 11.27 * 2**30 - 4.25 * n_experts) / (20_914_757_184 - n_experts), rel=1e-12
    )
    assert formulas.weight_bytes(config, precision) == pytest.approx(11.27 * 2**30, rel=2e-3)  # gains and biases have 16 bits
    # A token's 4 of 32 experts, and everything else but the embedding, which has a head beside it.
    streamed = n_experts // 8 * 17 // 32 + precision.bits_per_weight / 8 * (20_914_757_184 - n_experts - 201_088 * 2880)
    assert formulas.weight_bytes(config, precision, streamed=True) == pytest.approx(streamed, rel=5e-3)
    with pytest.raises(InputError, match="weights beside MXFP4 experts would take"):
        measurements._measurement(row | {"weight_file_gib": "5"})


def test_a_format_without_a_size_is_refused():
    with pytest.raises(InputError, match="quant 'int4wo-64 \\(bfloat16\\)' does not say how many bits"):
        weight_bits({"quant": "int4wo-64 (bfloat16)"}, preset("llama-2-7b"))


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"), ("NVIDIA A100 SXM 80GB", "a100-sxm-80gb"),
    ("Apple M2 Ultra (76-core GPU)", "apple-m2-ultra-76-core-gpu"), ("AMD Radeon RX 7900 XTX", "radeon-rx-7900-xtx"),
    ("Intel Arc A770 16GB", "arc-a770-16gb"), ("NVIDIA DGX Spark (GB10)", "dgx-spark-gb10"),
])  # fmt: skip
def test_device_names(device, name):
    assert gpu_name(device) == name


@pytest.mark.parametrize(("cells", "name"), [
    ({"engine": "vLLM", "engine_version": "0.7.3"}, "vLLM 0.7.3"), ({"engine": "a new one"}, "generic"),
    ({"engine": "llama.cpp", "note": "llama-bench -fa 1, depth 0"}, "llama.cpp  fused"),
    ({"engine": "llama.cpp", "note": "flash attention off"}, "llama.cpp  unfused"),
    ({"engine": "llama.cpp", "backend": "vulkan_radv"}, "llama.cpp-vulkan unfused"),
])  # fmt: skip
def test_engine_names(cells, name):
    assert engine_name(cells) == name


@pytest.mark.parametrize(("name", "known"), [
    ("Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("Llama 2 70B Chat", "llama-2-70b"),
    ("Gemma-3-4B (text)", "gemma-3-4b"), ("gemma-3-4b-it", "gemma-3-4b"), ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("Mixtral-8x7B-v0.1", "mixtral-8x7b-v0.1"), ("gpt-oss-120b", "gpt-oss-120b"), ("GPT-2 (124M)", "gpt-2"), ("GPT-2 XL", "gpt-2-xl"),
])  # fmt: skip
def test_names_of_one_shape(name, known):
    assert model_config(name) == preset(known)


@pytest.mark.parametrize("name", ["Llama-3-8", "Llama-2-8B", "GPT-J-6B", "Mistral-7B-v0.2", "instruct", ""])
def test_a_shape_that_is_not_known_is_not_guessed(name):
    with pytest.raises(InputError, match="no model"):
        model_config(name)


def test_model_names():
    assert model_config("LLaMA-7B") == preset("llama-7b")
    assert model_config("Mistral-Small-3.1-24B (text)") == preset("mistral-small-3.1-24b")
    assert model_config("Qwen2.5-7B").qkv_bias
    with pytest.raises(InputError, match="no model 'Lama-3-8B'; known: llama-3-8b"):
        model_config("Lama-3-8B")


def test_a_decode_row_is_steps_on_a_filled_cache_and_a_prefill_row_one_forward():
    row = ROW | {"context_start": "4096"}
    measurement = measurements._measurement(row)
    assert measurement.request == {"n_prompt": 4096, "n_cached": 0, "n_output": 129, "batch": 1}
    assert (measurement.prefill, measurement.tokens, measurement.measured_s) == (False, 1, 1 / 130)
    prefill = measurements._measurement(row | {"metric": "prefill_tok_s", "prompt_tokens": "2048", "batch": "4"})
    assert prefill.request == {"n_prompt": 6144, "n_cached": 4096, "n_output": 1, "batch": 4}
    assert prefill.measured_s == 4 * 2048 / 130
    assert measurements._measurement(row | {"metric": "tpot_ms", "batch": "8"}).measured_s == 0.130


def test_a_window_and_the_untied_embedding_are_respected(validated):
    windowed = ROW | {"id": "w", "shape": "Mistral-7B-v0.1", "context_start": "16384", "weight_file_gib": "3.83"}
    full = windowed | {"id": "f", "shape": "Mistral-7B-v0.3"}
    by_id = {row["id"]: row for row in validated(windowed, full)["worst"]}
    # KV of 4096 rows beside that of 16384 and more
    assert by_id["w"]["floor"] > 1.3 * by_id["f"]["floor"]
    weights = 8 * 3.83 * 2**30 / 7_241_732_096 / 8 * 7_110_660_096
    assert by_id["w"]["floor"] == pytest.approx(936.2e9 / (weights + 4096 * 131_072), rel=1e-3)


# --- what comes of it ----------------------------------------------------------------


def test_the_readme_shows_the_table_of_the_sample():
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("tools/validate.py tests/data/measurements-sample.csv")[1]
    result = run(SAMPLE)
    assert result.returncode == 0, result.stderr
    assert shown.split("```\n")[1].rstrip("\n") == result.stdout.split("\n\n")[0]


def test_groups_have_the_errors_of_their_rows(sample):
    usable, skipped = measurements.read(SAMPLE)
    group = next(each for each in sample["groups"] if (each["metric"], each["engine"], each["batch"]) == ("decode_tok_s", "all", "1"))
    errors = []
    for each in usable:
        if each.row["metric"] == "decode_tok_s" and each.request["batch"] == 1:
            level = predict(each.config, each.precision, each.gpu, engine=each.engine, **each.request).expected
            errors.append(abs(1 / level.tpot_s / float(each.row["value"]) - 1))
    assert group["rows"] == len(errors) > 10
    assert group["expected"]["median_error"] == pytest.approx(statistics.median(errors), rel=1e-12)
    assert sum(group["rows"] for group in sample["groups"] if group["engine"] == "all") == len(usable)
    assert sum(group["rows"] for group in sample["groups"] if group["engine"] != "all") == len(usable)
    assert sum(sample["skipped"].values()) == len(skipped)
    assert len(usable) + len(skipped) == len(SAMPLE.read_text(encoding="utf-8").splitlines()) - 1


def test_decode_of_the_sample_is_near_and_above_its_floor(sample):
    group = sample["groups"][0]
    assert group["expected"]["median_error"] < 0.1 < group["floor"]["median_error"]
    assert sample["floor_violations"] == []


def test_the_measured_value_is_only_compared_with(validated):
    half, double = [validated(ROW | {"id": "x", "value": value})["worst"] for value in ("65", "260")]
    (one,), (other,) = [[row for row in rows if row["id"] == "x"] for rows in (half, double)]
    assert all(one[level] == other[level] for level in validation.LEVELS)
    assert one["error"] == pytest.approx(4 * (1 + other["error"]) - 1)


def test_a_measurement_better_than_the_floor_is_named(validated):
    result = validated(ROW | {"id": "fast", "value": "1000"})
    assert [row["id"] for row in result["floor_violations"]] == ["fast"]
    assert [group["floor_violations"] for group in result["groups"]] == [1, 1]


def test_an_engine_that_is_not_listed_is_predicted_by_generic(validated):
    other = ROW | {"id": "new", "engine": "NewEngine", "backend": "", "weight_file_gib": "", "quant": "F16"}
    by_id = {row["id"]: row for row in validated(other)["worst"]}
    generic = predict(preset("llama-2-7b"), Precision(), "rtx-3090", 1, 129)
    assert by_id["new"]["expected"] == pytest.approx(1 / generic.expected.tpot_s)


def test_json_and_csv_and_output(tmp_path, sample):
    assert json.loads(run(SAMPLE, "--format", "json").stdout) == json.loads(json.dumps(sample))
    assert set(sample["groups"][0]) == {
        "metric", "engine", "batch", "rows", "floor_violations", "floor", "roofline", "expected", "interval_coverage",
    }  # fmt: skip
    assert len(sample["worst"]) == 10
    path = tmp_path / "result.csv"
    assert run(SAMPLE, "--format", "csv", "--output", path).returncode == 0
    lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    assert [line["engine"] for line in lines] == [group["engine"] for group in sample["groups"]]
    assert float(lines[0]["expected_median_error"]) == sample["groups"][0]["expected"]["median_error"]


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(("cells", "reason"), [
    ({"quality": "C"}, "quality C"),
    ({"metric": "e2e_output_tok_s"}, "metric 'e2e_output_tok_s' is not predicted, expected one of decode_tok_s"),
    ({"device": "NVIDIA GeForce RTX 3091"}, "no GPU 'rtx-3091'; known: rtx-3090"),
    ({"shape": "Llama-2-8B"}, "no model 'Llama-2-8B'; known: llama-3-8b, llama-2-7b"),
    ({"value": "130 tok/s"}, "value is '130 tok/s', expected a plain number without a unit"),
    ({"value": "0"}, "value is 0, expected a number above 0"), ({"value": "-3"}, "value is -3, expected a number above 0"),
    ({"value": "nan"}, "value is nan"), ({"value": "inf"}, "value is inf"), ({"value": ""}, "value is empty"),
    ({"batch": ""}, "batch is empty"), ({"batch": "0"}, "batch is 0"), ({"batch": "1.5"}, "batch is 1.5, expected a whole number"),
    ({"context_start": "-1"}, "context_start is -1, expected a number of 0 or more"),
    ({"batch": "9999999999999"}, "batch is 9999999999999, expected at most 1000000000000"),
    ({"context_start": "4k"}, "context_start is '4k'"), ({"weight_file_gib": "3.56 GiB"}, "weight_file_gib is '3.56 GiB'"),
    ({"weight_file_gib": "3560"}, "the weights would take 4.54e\\+03 bits each"), ({"kv_dtype": "q5_1"}, "kv_dtype is 'q5_1'"),
    ({"metric": "ttft_ms"}, "prompt_tokens is 0: a prefill of unknown length"),
    ({"metric": "prefill_tok_s", "prompt_tokens": ""}, "prompt_tokens is empty: a prefill of unknown length"),
    ({"n_gpu": "3"}, "n_gpus is 3, expected a divisor of the 32 heads"),
    ({"weight_file_gib": "", "quant": "q?"}, "quant 'q\\?' does not say how many bits"),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_skipped_with_its_reason(validated, cells, reason):
    result = validated(ROW | {"id": "bad"} | cells)
    assert [row["id"] for row in result["skipped_rows"]] == ["bad"]
    (found,) = result["skipped"]
    assert re.match(reason, found), found
    assert [group["rows"] for group in result["groups"]] == [1, 1]


def test_a_column_that_is_unknown_is_not_passed_over(tmp_path):
    """What stands in it may change what the row says; an empty cell says nothing."""
    columns = (*COLUMNS, "contxt_start")
    path = write(tmp_path / "rows.csv", ROW, ROW | {"id": "r2", "contxt_start": "512"}, columns=columns)
    usable, skipped = measurements.read(path)
    assert [each.row["id"] for each in usable] == ["r1"]
    assert skipped == [("r2", "column 'contxt_start' is unknown, did you mean context_start?")]


def test_a_column_that_is_there_twice_says_nothing(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*ROW, "value"]) + "\n" + ",".join([*ROW.values(), "131"]) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="r1: column value is there 2 times"):
        measurements.read(path)


def test_a_line_with_too_few_cells_is_skipped(tmp_path):
    path = write(tmp_path / "rows.csv", ROW)
    with open(path, "a", encoding="utf-8") as file:
        file.write("r2,only,three\n")
    usable, skipped = measurements.read(path)
    assert (len(usable), skipped) == (1, [("r2", f"3 cells, expected {len(COLUMNS)}")])


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read"), ("", "nothing in it can be predicted; column model, device, batch, prompt_tokens"),
    ("id,device\n", "column model, batch, .* is missing"),
    (",".join(COLUMNS) + ",contxt_start\n" + "," * len(COLUMNS) + "x\n", "column 'contxt_start' is unknown, did you mean context_start?"),
    (",".join(COLUMNS) + "\n", "it has no rows"),
    (",".join(COLUMNS) + "\n" + "x," * (len(COLUMNS) - 1) + "C\n", "x: metric 'x' is not predicted"),
    (b"\xff\xfe\x00", "is not CSV in UTF-8"),
])  # fmt: skip
def test_nothing_readable_is_one_line_and_status_2(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and re.search(message, result.stderr), result.stderr
