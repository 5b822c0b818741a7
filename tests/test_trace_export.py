"""A trace for other programs: CSV rows that are its counts, and a timeline that adds up to its predictions."""

import csv
import json

import pytest

import costmodel
import npinfer
from costmodel.timeline import timeline
from npinfer import Counts
from test_trace import printed, report, run, tool  # noqa: F401

ARGUMENTS = ("--layers", "2", "--prompt-tokens", "50", "--output-tokens", "4")


@pytest.mark.parametrize("detail, key", [("op", "operations"), ("layer", "layers"), ("step", "steps")])
def test_csv_rows_are_those_of_json(printed, report, detail, key):  # noqa: F811
    rows = list(csv.DictReader(printed(*ARGUMENTS, "--detail", detail, "--format", "csv").splitlines()))
    expected = report(*ARGUMENTS, "--detail", detail)[key]
    assert rows == [{name: "" if value is None else str(value) for name, value in row.items()} for row in expected]


def test_csv_of_the_phases(printed, report):  # noqa: F811
    rows = list(csv.DictReader(printed(*ARGUMENTS, "--format", "csv").splitlines()))
    counts = report(*ARGUMENTS)["counts"]
    assert [row.pop("phase") for row in rows] == ["prefill", "decode"]
    assert [{name: int(value) for name, value in row.items()} for row in rows] == [counts["prefill"], counts["decode"]]


def test_the_timeline_adds_up(printed, report):  # noqa: F811
    gpus = ("--gpu", "rtx-4090", "--gpu", "h100-sxm")
    events = json.loads(printed(*ARGUMENTS, *gpus, "--format", "chrome"))["traceEvents"]
    result = report(*ARGUMENTS, *gpus)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rtx-4090", "h100-sxm"]
    for number, prediction in enumerate(result["predictions"]):
        timed = [event for event in events if event["ph"] == "X" and event["pid"] == number]
        for before, after in zip(timed, timed[1:]):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
        prefill = [event for event in timed if event["cat"] == "prefill"]
        assert sum(event["dur"] for event in prefill) / 1e6 == pytest.approx(prediction["roofline"]["ttft_s"])
        # Every operation of these steps is bound by bandwidth, so that a sum of maxima is the maximum of sums.
        decode = [event for event in timed if event["cat"] == "decode"]
        assert {event["args"]["forward"] for event in decode} == {1, 2, 3}
        assert sum(event["dur"] for event in decode) / 3e6 == pytest.approx(prediction["roofline"]["tpot_s"])
        for name in Counts._fields:
            total = result["counts"]["prefill"][name] + result["counts"]["decode"][name]
            assert sum(event["args"][name] for event in timed) == total


def test_reused_rows_take_no_time_of_a_device():
    model = npinfer.Transformer.shape_only(npinfer.preset("smollm2-135m"))
    prefixes = npinfer.PrefixCache(model)
    prefixes.add(range(40))
    with npinfer.Ledger() as ledger:
        prefixes.prefill(range(50)).release()
    events = list(timeline(ledger, costmodel.gpu("rtx-4090"), 165.2e12))
    assert "cache_load" in {op for (op,) in ledger.by("op")}
    assert "cache_load" not in {event.op for event in events}
    assert events[0].start_s == 0 and {event.bound for event in events} <= {"compute", "bandwidth"}


@pytest.mark.parametrize("arguments, message", [
    (("--output-tokens", "20000"), "would hold 420,000 events, expected at most 200,000; use fewer output tokens"),
    (("--gpu", "apple-m1-8-core-gpu-8gb"), "has no fp16 rate to time a prefill by; choose --compute"),
    (("--format", "perfetto"), "invalid choice: 'perfetto'"),
])
def test_bad_input_is_one_line_and_status_2(run, arguments, message):  # noqa: F811
    result = run("--format", "chrome", *arguments)
    assert (result.status, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert message in result.err
