"""Fitting the engines' parameters: known ones are found again, strange rows do not lead, and no device predicts itself."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from costmodel import calibration, engines, measurements

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "data" / "measurements-sample.csv"
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def rows():
    return calibration.determined(calibration.rows(measurements.read(SAMPLE)[0]))


def test_the_expected_level_is_the_sum_that_is_fitted(rows):
    """Amounts times the parameters in the file are what `predict` says, wherever it is above the roofline."""
    from costmodel import predict

    known = {name: parameter.value for name, parameter in engines.parameters().items()}
    usable = measurements.read(SAMPLE)[0]
    for row, each in zip(calibration.rows(usable), usable):
        level = predict(each.config, each.precision, each.gpu, **each.request, engine=each.engine).expected
        assert calibration.predict(row, known) == pytest.approx(level.ttft_s if each.prefill else level.tpot_s, rel=1e-12)


def test_known_parameters_are_found_again(rows):
    names, table = rows
    made = {name: 1e-4 if "layer" in name or "request" in name else 1e-9 if "score_" in name else 1.5 for name in names}
    table = [row._replace(measured_s=row.fixed_s + sum(made[name] * amount for name, amount in row.amounts.items())) for row in table]
    found = calibration.fit(table, names)
    again = [row.fixed_s + sum(found[name] * amount for name, amount in row.amounts.items()) for row in table]
    assert again == pytest.approx([row.measured_s for row in table], rel=1e-3)
    assert found["stream"] == pytest.approx(1.5, rel=0.01)


def test_a_strange_row_moves_a_median_little():
    """Nine rows of 2 s for each unit and one of 20 s: least squares would say 3.8."""
    (row, *_) = calibration.rows(measurements.read(SAMPLE)[0])
    table = [row._replace(amounts={"stream": 1.0}, fixed_s=0.0, measured_s=seconds) for seconds in [2.0] * 9 + [20.0]]
    assert calibration.fit(table, ["stream"])["stream"] == pytest.approx(2.0, rel=0.01)


def test_no_parameter_is_negative():
    (row, *_) = calibration.rows(measurements.read(SAMPLE)[0])
    table = [row._replace(amounts={"stream": x, "layer_cuda": 1.0}, fixed_s=0.0, measured_s=x - 0.5) for x in (1.0, 2.0, 3.0)]
    found = calibration.fit(table, ["stream", "layer_cuda"])
    assert found["layer_cuda"] == 0.0 and found["stream"] > 0


def test_a_device_is_predicted_without_its_own_rows(rows):
    names, table = rows
    device = "rtx-4090"
    assert any(row.measurement.gpu.name == device for row in table)
    spoilt = [row._replace(measured_s=100 * row.measured_s) if row.measurement.gpu.name == device else row for row in table]
    pairs = zip(table, calibration.cross_validated(table, names), calibration.cross_validated(spoilt, names))
    for row, before, after in pairs:
        if row.measurement.gpu.name == device:
            assert before == after
    assert calibration.fit(spoilt, names) != calibration.fit(table, names)


def test_a_range_counts_every_device_the_same(rows):
    """Six devices with ratios 1 to 6; the rows of the first, fifty, weigh as much as the one of any other."""
    (row, *_) = rows[1]

    def on(name, ratio):
        gpu = row.measurement.gpu.__class__(name=name, memory_bytes=1, memory_bytes_per_s=1.0)
        return row._replace(measurement=row.measurement._replace(gpu=gpu), measured_s=float(ratio))

    table = [on("a", 1)] * 50 + [on(name, ratio) for name, ratio in zip("bcdef", range(2, 7))]
    low, high = calibration.range_of(table, [1.0] * len(table))
    # midpoints of the six equal weights: 1/12, 3/12, ...; 0.9 lies 0.9 of the way from 9/12 to 11/12
    assert (low, high) == (pytest.approx(1.0), pytest.approx(5.9))
    assert calibration.range_of(table[:-1], [1.0] * (len(table) - 1)) is None


def test_errors_are_those_of_the_metric(rows):
    _, table = rows
    some = [row for row in table if row.measurement.tokens is None][:3]
    found = calibration.statistics(some, [2 * row.measured_s for row in some])
    assert (found["rows"], found["error"]) == (3, pytest.approx(1.0))  # a time twice as long: 100 % off
    some = [row for row in table if row.measurement.tokens is not None][:3]
    assert calibration.statistics(some, [2 * row.measured_s for row in some])["error"] == pytest.approx(0.5)  # half the speed


def test_the_file_keeps_everything_but_its_numbers():
    import calibrate

    text = Path(engines.FILE).read_text(encoding="utf-8")
    found = {
        "parameters": {"stream": {"value": 1.25, "rows": 7, "devices": 3}},
        "engines": {"vllm": {"decode": {"rows": 8, "error": 0.1, "p90": 0.2, "range": [0.5, 2.0]}, "prefill": {"rows": 0}}},
    }
    before, after = tomllib.loads(text), tomllib.loads(calibrate.updated(text, found, "2030-01-02"))
    assert after["stream"] == before["stream"] | {"value": 1.25, "rows": 7, "devices": 3}
    calibrated = {"date": "2030-01-02", "rows_decode": 8, "error_decode": 0.1, "p90_decode": 0.2, "range_decode": [0.5, 2.0], "rows_prefill": 0}
    kept = {key: value for key, value in before["vllm"].items() if not key.startswith(("error", "p90", "range"))}
    assert after["vllm"] == kept | calibrated
    assert {name: table for name, table in after.items() if name not in ("stream", "vllm")} == {
        name: table for name, table in before.items() if name not in ("stream", "vllm")
    }


def test_the_command_prints_the_same_each_time():
    command = [sys.executable, ROOT / "tools" / "calibrate.py", "engines", SAMPLE]
    first, second = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert first == second
    assert "cross-validated by device" in first and "layer_metal" in first


@pytest.mark.parametrize("devices, expected", [
    (1, "no parameter can be fitted: each takes rows of 2 devices at least"),
    (2, "inside the range of the other devices: unknown, of too few devices"),
])  # fmt: skip
def test_few_devices_are_fitted_or_refused_in_one_line(devices, expected, tmp_path):
    """Lines 2 and 3 of the sample are a decode and a prefill on one device, 4 and 5 the same on another."""
    few = tmp_path / "few.csv"
    few.write_text("".join(SAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)[: 1 + 2 * devices]), encoding="utf-8")
    result = subprocess.run([sys.executable, ROOT / "tools" / "calibrate.py", "engines", few], capture_output=True, text=True)
    assert result.returncode == (2 if devices == 1 else 0)
    (line,) = [line for line in (result.stdout + result.stderr).splitlines() if expected in line]
    assert devices > 1 or result.stderr == line + "\n"


def test_a_date_that_is_none_is_refused():
    import calibrate

    assert str(calibrate.parser().parse_args(["engines", "x.csv", "--date", "2030-01-02"]).date) == "2030-01-02"
    with pytest.raises(SystemExit):
        calibrate.parser().parse_args(["engines", "x.csv", "--date", 'today"'])
