"""Replaying a trace: hits against a plain model of an LRU cache, counts against runs, and what is refused."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel
import npinfer
from costmodel import caching, formulas
from costmodel.replay import BLOCK_TOKENS, Request, parse_request, read_trace, replay, run_store
from npinfer import InputError, Precision

REPO = Path(__file__).parent.parent
HEAD = Path(__file__).parent / "data" / "conversation-head.jsonl"
MISTRAL, FP16 = npinfer.preset("mistral-7b"), Precision()
LINE = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}'


def plain_lru(requests, n_blocks):
    """Blocks held by their whole history, most recently used last; the plainest thing that is right."""
    held, hits, evicted = [], [], 0
    for request in requests:
        histories = [tuple(request.hash_ids[: i + 1]) for i in range(len(request.hash_ids))]
        matched = [history for history in histories if history in held]  # a parent is held if its child is
        hits.append(len(matched))
        new = histories[len(matched) :]
        others = [history for history in held if history not in matched]
        if n_blocks is None or len(histories) <= n_blocks:
            excess = 0 if n_blocks is None else max(0, len(held) + len(new) - n_blocks)
            evicted += excess
            held = others[excess:] + histories[::-1]
        else:
            held = others + matched[::-1]
    return hits, evicted


@st.composite
def traces(draw):
    """Requests whose ids are a block behind one history: a tree of histories, ids numbered as they come."""
    numbers, requests = {}, []
    for _ in range(draw(st.integers(1, 12))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        ids = [numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))]
        last = draw(st.integers(1, BLOCK_TOKENS))
        requests.append(Request((len(ids) - 1) * BLOCK_TOKENS + last, ids))
    return requests


@given(traces(), st.none() | st.integers(1, 12))
def test_hits_are_those_of_a_plain_lru(requests, n_blocks):
    hits = run_store(requests, None if n_blocks is None else 10 * n_blocks, 10)
    expected, evicted = plain_lru(requests, n_blocks)
    tokens = [min(n * BLOCK_TOKENS, request.input_length) for n, request in zip(expected, requests)]
    assert hits.matched_tokens.tolist() == tokens
    assert (hits.hit_blocks, hits.evicted_blocks) == (sum(expected), evicted)
    assert hits.peak_bytes <= (10**9 if n_blocks is None else 10 * n_blocks)


def test_the_head_of_the_conversation_trace():
    requests, skipped = read_trace(HEAD.read_text().splitlines())
    assert (len(requests), skipped) == (60, 0)
    for n_blocks in (None, 400, 60):
        block_bytes = BLOCK_TOKENS * 131_072
        capacity = None if n_blocks is None else n_blocks * block_bytes
        result = replay(requests, MISTRAL, FP16, "h100-sxm", [capacity])
        (row,) = result["results"]
        hits, evicted = plain_lru(requests, n_blocks)
        assert row["block_hit_rate"] == sum(hits) / sum(len(request.hash_ids) for request in requests)
        assert row["evicted_blocks"] == evicted
        cached = [min(512 * n, request.input_length - 1) for n, request in zip(hits, requests)]
        one = [formulas.forward_counts(MISTRAL, FP16, 1, 0, r.input_length) for r in requests]
        two = [formulas.forward_counts(MISTRAL, FP16, 1, n, r.input_length - n) for n, r in zip(cached, requests)]
        assert row["flops_saved"] == sum(c.matmul_flops for c in one) - sum(w.matmul_flops for w in two)
        assert result["closed_form"] == {"agrees": True}
        times = [
            costmodel.predict(MISTRAL, FP16, "h100-sxm", r.input_length, 1, n_cached=n).roofline.ttft_s
            for n, r in zip(cached, requests)
        ]
        assert row["ttft_s"]["roofline"]["warm"]["p90"] == pytest.approx(np.percentile(times, 90), rel=1e-12)
        assert row["ttft_s"]["expected"] is None


def test_a_device_without_the_rate_has_no_times():
    requests, _ = read_trace([LINE])
    (row,) = replay(requests, MISTRAL, FP16, "apple-m1-8-core-gpu-8gb", [None])["results"]
    assert row["ttft_s"] == dict.fromkeys(caching.LEVELS)


@pytest.mark.parametrize("line, match", [
    ("{", "is not JSON"),
    ("[1]", "is not a JSON object"),
    (LINE.replace("600", "0"), "input_length is 0, expected a whole number from 1"),
    (LINE.replace("600", "600.5"), "input_length is 600.5"),
    (LINE.replace("600", "true"), "input_length is True"),
    (LINE.replace('"timestamp": 5, ', ""), "timestamp is None"),
    (LINE.replace("[0, 7]", "[0, -7]"), "hash_ids is not a list of whole numbers"),
    (LINE.replace("[0, 7]", '"07"'), "hash_ids is not a list of whole numbers"),
    (LINE.replace("[0, 7]", "[0]"), "1 hash_ids, expected 2 blocks of 512 tokens for input_length 600"),
])
def test_a_malformed_line_is_named_by_its_number(line, match):
    with pytest.raises(InputError, match=match):
        parse_request(line)
    with pytest.raises(InputError, match="^line 3: .*--skip-bad-lines"):
        read_trace([LINE, "", line])
    assert read_trace([LINE, "", line, LINE], skip_bad=True) == ([parse_request(LINE)] * 2, 1)


def test_a_trace_without_requests_is_refused():
    with pytest.raises(InputError, match="no request"):
        read_trace(["", "junk"], skip_bad=True)


def run_tool(*arguments):
    command = [sys.executable, str(REPO / "tools" / "replay.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line_in_three_forms():
    capacities = ["--capacity", "unbounded", "--capacity", "400 blocks", "--capacity", "4 GiB"]
    result = json.loads(run_tool(str(HEAD), *capacities, "--format", "json").stdout)
    assert [row["capacity_blocks"] for row in result["results"]] == [None, 400, 64]
    assert result["trace"] == str(HEAD) and result["requests"] == 60
    keys = {"capacity_blocks", "block_hit_rate", "token_hit_rate", "evicted_blocks", "peak_bytes", "flops_saved", "ttft_s"}
    assert all(keys <= row.keys() for row in result["results"])
    assert set(result["results"][0]["ttft_s"]["floor"]["cold"]) == {"p50", "p90", "p99"}
    rows = list(csv.DictReader(io.StringIO(run_tool(str(HEAD), *capacities, "--format", "csv").stdout)))
    assert [int(row["evicted_blocks"]) for row in rows] == [row["evicted_blocks"] for row in result["results"]]
    assert float(rows[1]["ttft_s.floor.warm.p99"]) == result["results"][1]["ttft_s"]["floor"]["warm"]["p99"]
    text = run_tool(str(HEAD), *capacities).stdout
    assert f"{result['results'][0]['block_hit_rate']:.2%}" in text and "agrees" in text


@pytest.mark.parametrize("arguments, met", [
    (["absent.jsonl"], "absent.jsonl"),
    ([str(HEAD), "--capacity", "8 GX"], "8 GX"),
    ([str(HEAD), "--capacity", "0 blocks"], "0 blocks"),
    ([str(HEAD), "--capacity", "-1 blocks"], "-1 blocks"),
    ([str(HEAD), "--capacity", "1000"], "one block"),
    ([str(HEAD), "--gpu", "abacus"], "abacus"),
    ([str(HEAD), "--model", "llama-9"], "llama-9"),
    ([str(REPO / "README.md")], "line 1: is not JSON"),
])
def test_bad_input_is_one_line_and_status_2(arguments, met):
    result = run_tool(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert met in result.stderr and len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr
