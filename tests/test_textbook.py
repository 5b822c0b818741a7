"""The chapter made executable: formulas held to the text's digits, exact values to arithmetic written out here."""

import csv
import io
import json
import re
import subprocess
import sys
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import costmodel
import npinfer
from costmodel.textbook import SECTIONS, chapter, sections
from costmodel.textbook_rows import Row, Setting
from npinfer import InputError, UnknownName

REPO = Path(__file__).parent.parent
ROWS = chapter()

# Mistral-7B by hand: q and o 4096 x 4096, k and v 1024 x 4096, three of 14336 x 4096; 32 layers.
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD, GAINS = 4096 * 32_000, 65 * 4096
STREAMED = MATRICES + HEAD + GAINS
KV = 2 * 32 * 8 * 128 * 2  # bytes of a token
PAIR = 4 * 32 * 32 * 128  # FLOPs of a (query, key) pair: 32 layers, 32 heads of 128, scores and mix
PEAK, BANDWIDTH = 165.2e12, 1008e9  # rtx-4090
SCALES = 2 * (32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096) + 32_000)  # fp16, one for each output
INT8 = MATRICES + HEAD + SCALES + 2 * GAINS


def needed(n_new, n_cached=0):
    """FLOPs of a prefill, masked pairs left out; the head runs for one position."""
    return 2 * n_new * MATRICES + 2 * HEAD + PAIR * (n_new * n_cached + n_new * (n_new + 1) // 2)


def moved(n_new, n_cached=0, weights=2 * STREAMED, embedding_row=8192):
    """Weights, embedding rows, KV read and written."""
    return weights + n_new * embedding_row + KV * (n_cached + n_new) + KV * n_new


def ttft_ms(n_new, n_cached=0):
    return 1e3 * max(needed(n_new, n_cached) / PEAK, moved(n_new, n_cached) / BANDWIDTH)


def steps_ms(n_output, n_prompt=1000, **formats):
    """All decode steps of a request, each in turn."""
    return 1e3 * sum(moved(1, n_prompt + i, **formats) for i in range(n_output - 1)) / BANDWIDTH


def latency_ms(n_output):
    return ttft_ms(1000) + steps_ms(n_output)


def recomputed(n_output):
    return sum(needed(1000 + i) for i in range(n_output))


def first(holds, start):
    """By a scan."""
    return next(n for n in count(start) if holds(n))


def gap(n_prompt):
    return needed(n_prompt) - 2 * n_prompt * STREAMED


SWEEP = (100, 200, 400, 800, 1600)
K_MS, B_MS = np.polyfit(SWEEP, [latency_ms(n) for n in SWEEP], 1)
EXACT = {
    "0": {"TTFT": ttft_ms(1000), "TPOT": steps_ms(100) / 99},
    "1": {
        "forwards for 100 tokens": 100,
        "weights read, 1000 tokens singly / at once": 1000 * (2 * STREAMED + 8192) / (2 * STREAMED + 1000 * 8192),
    },
    "2.1": {
        "weights of a d x d layer, d = 4096": 16_777_216,
        "FLOPs on one token": 33_554_432,
        "FLOPs of a step for each weight it reads": needed(1, 1000) / STREAMED,
    },
    "2.2": {
        "K and V rows computed without a cache": 104_950,  # 1000 + 1001 + ... + 1099
        "K and V rows computed with it": 1099,
        "KV bytes that decoding reads": KV * sum(range(1001, 1100)),
        "FLOPs without a cache / with it": recomputed(100) / (needed(1000) + sum(needed(1, 1000 + i) for i in range(99))),
        "FLOPs of 200 tokens / of 100, no cache": recomputed(200) / recomputed(100),
        "FLOPs of 20,000 tokens / of 10,000, no cache": recomputed(20_000) / recomputed(10_000),
        "output from which the square prevails": first(lambda n: recomputed(2 * n) >= 3 * recomputed(n), 1700),
        "equal tokens with and without, small model": 12,
    },
    "3": {
        "intensity of a prefill of 1000 tokens": needed(1000) / moved(1000),
        "intensity of decoding": sum(needed(1, 1000 + i) for i in range(99)) / sum(moved(1, 1000 + i) for i in range(99)),
        "ridge": PEAK / BANDWIDTH,
        "prompt from which prefill is compute-bound": first(lambda n: needed(n) / PEAK > moved(n) / BANDWIDTH, 1),
    },
    "4.1": {"parameters that a step reads": 7.110660096, "weight bytes": 14.221320192, "last-level cache": 72},
    "4.2": {
        "KV elements for each token": 65_536,
        "KV bytes for each token": {"B": 131_072, "KiB": 128},
        "KVRead(1000)": 131.072,
        "KVRead / weight bytes": 131_072_000 / 14_221_320_192,
        "context whose KV equals the weights": 108_501,  # 14,221,320,192 / 131,072 = 108,500.06
    },
    "5": {
        "TPOT_min, fp16 weights": 14.221320192 / 1.008,
        "with the KV of 1,050 tokens": (14_221_320_192 + 8192 + 131_072 + 1050 * 131_072) / 1008e6,
        "TPOT_min, 8-bit weights": 7.110660096 / 1.008,
        "int8 with its scales": INT8 / 1008e6,
        "int8 with scales and the KV of 1,050": steps_ms(100, weights=INT8, embedding_row=4096 + 2) / 99,
    },
    "6": {
        "b": B_MS,
        "k": K_MS,
        "r2 of the fit": np.corrcoef(SWEEP, [latency_ms(n) for n in SWEEP])[0, 1] ** 2,
        "b / k": B_MS / K_MS,
        "last step of the sweep / first, less 1": moved(1, 2598) / moved(1, 1000) - 1,
        # A token that sees n positions has n - 1 cached.
        "context from which a step takes 10 % longer": first(lambda n: moved(1, n - 1) >= 1.1 * moved(1, 1000), 11_000),
        "prompt from which b exceeds 10 k": first(lambda n: ttft_ms(n) > 10e3 * moved(1, n) / BANDWIDTH, 1000),
        "TTFT, L = 128": moved(128) / BANDWIDTH * 1e3,
        "TTFT, L = 1024": needed(1024) / PEAK * 1e3,
        "TTFT, L = 8192": needed(8192) / PEAK * 1e3,
        "TTFT, L = 32768": needed(32_768) / PEAK * 1e3,
        "prompt from which attention adds 10 %": first(lambda n: PAIR * (n + 1) / 2 >= 0.2 * MATRICES, 5000),
    },
    "7": {
        "latency, b = 300 ms, k = 10 ms, x = 80": 1090,
        "latency, b = 300 ms, k = 10 ms, x = 400": 4290,
        "latency of x = 400 / of x = 80": 429 / 109,
        "TPS, x = 80": 80 / 1.09,
        "TPS, x = 400": 400 / 4.29,
        "latency, predicted, x = 100": latency_ms(100),
        "TPS, predicted, x = 100": 100_000 / latency_ms(100),
        "latency, predicted, x = 500": latency_ms(500),
        "TPS, predicted, x = 500": 500_000 / latency_ms(500),
    },
    "8": {
        "TPS, N = 1": None,
        **{f"TPS, N = {n:,}": 1000 * n / latency_ms(n) for n in (10, 100, 1000, 10_000)},
        "slope for small N": 1000 / ttft_ms(1000),
        "limit for large N": 99_000 / steps_ms(100),
    },
    "9": {
        "effective rate at eta 0.6": 187.2,
        "effective rate of the GPU at eta 0.6": 165.2,
        **{f"2*B*L*P, L = {n}": needed(n) / 1e12 for n in (128, 1024, 8192, 32_768)},
        "2*B*L*P of all parameters, L = 128": needed(128) / 1e12,
        "2*B*C*P, C = 100": sum(needed(1, 1000 + i) for i in range(99)) / 1e12,
    },
    "10": {"TTFT at eta 0.6": needed(1000) / 99.12e9, "TPOT": steps_ms(100) / 99},
    "11": {
        "tokens prefilled behind the system prompt": 200,
        "KV loaded for it": 1200 * 131_072,
        # Whole rectangles: 1400 x 1400 pairs against 200 x 1400, and the linear layers of 1200 tokens.
        "FLOPs avoided": (2 * 1200 * MATRICES + PAIR * 1200 * 1400) / 1e12,
    },
    "12.1": {
        "share of the prefill's cost that is left": needed(200, 1200) / needed(1400),
        "share of TTFT": ttft_ms(200, 1200) / ttft_ms(1400),
        "least share: one pass over the weights": 2 * STREAMED / BANDWIDTH * 1e3 / ttft_ms(1400),
    },
    "12.2": {
        **{f"reused, {name}, same order": 512 for name in ("prefix cache", "prompt cache", "cache of segments")},
        **{f"reused, {name}, swapped order": 0 for name in ("prefix cache", "prompt cache")},
        "reused, cache of segments, swapped order": 512,
    },
    "13": {
        **{f"prompt of turn {turn}": 400 + 400 * turn for turn in range(1, 7)},
        **{f"TTFT of turn {turn} without a cache": ttft_ms(400 + 400 * turn) for turn in range(1, 7)},
        "TTFT of turn 1 with a session cache": ttft_ms(800),
        **{f"TTFT of turn {turn} with a session cache": ttft_ms(400, 400 * turn) for turn in range(2, 7)},
    },
    "14": {
        "output for which both phases take as long": 1 + ttft_ms(1000) / (steps_ms(100) / 99),  # N - 1 steps
        "share of the prefill, N = 2": ttft_ms(1000) / latency_ms(2),
        "share of the prefill, N = 1000": ttft_ms(1000) / latency_ms(1000),
        "TTFT of half the prompt / of the whole": ttft_ms(500) / ttft_ms(1000),
        "TPOT with int8 weights / fp16": steps_ms(100, weights=INT8, embedding_row=4096 + 2) / steps_ms(100),
    },
    "15": {
        "latency of 100 tokens": latency_ms(100),
        "floor of a decode step": steps_ms(100) / 99,
        "TTFT with half the prompt cached / without": ttft_ms(500, 500) / ttft_ms(1000),
    },
}  # fmt: skip


def test_the_constants_by_hand():
    assert (STREAMED, KV, MATRICES) == (7_110_660_096, 131_072, 6_979_321_856)


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row.text, int | float)], ids=lambda row: row.quantity)
def test_the_formula_gives_the_digits_of_the_text(row):
    decimals = len(repr(row.text).partition(".")[2])
    assert round(row.formula, decimals) == row.text


def test_one_seventh():
    share = next(row for row in ROWS if row.section == "12.1")
    assert share.formula == float(Fraction(share.text.removeprefix("about "))) == 200 / 1400
    assert round(share.exact, 4) == 0.1460


def test_every_number_of_the_chapter_is_a_row():
    printed = {(row.section, row.text) for row in ROWS if isinstance(row.text, int | float)}
    assert printed == {
        ("2.1", 2), ("4.1", 7.111), ("4.1", 14.2), ("4.2", 65_536), ("4.2", 131_072), ("4.2", 128), ("5", 14.1), ("5", 7.0),
        ("7", 1100), ("7", 4300), ("7", 3.91), ("9", 187.2), *[("13", n) for n in range(800, 2801, 400)],
    }  # fmt: skip
    assert [row.quantity for row in ROWS if row.text == 128] == ["KV bytes for each token", "KVRead(1000)"]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.quantity.startswith("share of the difference")],
                         ids=lambda row: f"{row.section} {row.quantity}")
def test_exact_is_what_the_accounting_says(row):
    expected = EXACT[row.section][row.quantity]
    expected = expected[row.unit] if isinstance(expected, dict) else expected
    if isinstance(expected, int) and isinstance(row.exact, int):
        assert row.exact == expected
    else:
        assert row.exact == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_every_expected_row_is_there():
    met = {(row.section, row.quantity) for row in ROWS}
    assert {(section, quantity) for section, rows in EXACT.items() for quantity in rows} <= met


def test_what_makes_the_difference_of_the_rough_flops():
    rows = [row for row in ROWS if row.section == "9"]
    for n in (128, 1024, 8192, 32_768):
        at = [row.quantity for row in rows].index(f"2*B*L*P, L = {n}")
        assert rows[at].formula == 2 * n * STREAMED / 1e12
        shares = {row.quantity.rpartition(" ")[2]: row.exact for row in rows[at + 1 : at + 5]}
        parts = {"attention": PAIR * n * (n + 1) // 2, "head": 2 * HEAD * (1 - n), "embedding": 0, "vectors": -2 * n * GAINS}
        assert shares == {name: pytest.approx(part / gap(n), rel=1e-12) for name, part in parts.items()}
        assert sum(shares.values()) == pytest.approx(1)


def test_figures_as_they_are_printed():
    exact = {(row.section, row.quantity): row.exact for row in ROWS}
    assert round(exact["5", "TPOT_min, fp16 weights"], 2) == 14.11
    assert round(exact["5", "with the KV of 1,050 tokens"], 2) == 14.25  # 14.245
    assert round(exact["5", "TPOT_min, 8-bit weights"], 2) == 7.05


# ---- sections, settings


def test_rows_come_in_the_order_of_the_chapter():
    assert list(dict.fromkeys(row.section for row in ROWS)) == list(SECTIONS)
    assert SECTIONS.keys() == EXACT.keys()


@pytest.mark.parametrize("name, found", [("12.1", ["12.1"]), ("12", ["12.1", "12.2"]), ("1", ["1"]), ("4", ["4.1", "4.2"])])
def test_sections_by_name(name, found):
    assert sections(name) == found
    assert chapter(section=name) == [row for row in ROWS if row.section in found]


@pytest.mark.parametrize("name", ["16", "", "12.", "12.10", "1 "])
def test_an_unknown_section_is_named(name):
    with pytest.raises(UnknownName, match="no section .*known: 0, 1, 2.1, .* 15$"):
        chapter(section=name)


def test_rows_that_quote_a_number_keep_the_chapters_model():
    other = chapter(Setting.of("llama-3.2-1b", "h100-sxm", 0.3))
    numbers = [[row for row in rows if isinstance(row.text, int | float)] for rows in (ROWS, other)]
    assert numbers[0] == numbers[1]
    assert [row.exact for row in other if row.section == "0"] != [row.exact for row in ROWS if row.section == "0"]


@pytest.mark.parametrize("gpu", ["rtx-4090", "h100-sxm"])
def test_the_share_of_the_time_has_one_weight_pass_as_its_floor(gpu):
    _, share, least = chapter(Setting.of(gpu=gpu), "12.1")
    assert share.exact >= least.exact
    assert gpu in share.note
    # 200 new tokens are fewer than the ridge of an H100: their floor is the pass, and the KV.
    assert ("one pass over the weights bounds" in share.note) == (gpu == "h100-sxm")


def test_a_missing_rate_is_unknown_not_zero():
    rows = chapter(Setting.of(gpu="apple-m1-8-core-gpu-8gb"))
    exact = {(row.section, row.quantity): row.exact for row in rows}
    assert exact["0", "TTFT"] is exact["3", "ridge"] is exact["6", "b"] is exact["8", "TPS, N = 100"] is None
    (note,) = [row.note for row in rows if row.quantity == "share of TTFT"]
    assert note == "the floor on apple-m1-8-core-gpu-8gb, whose matmul rate is not known"
    bytes_per_s = costmodel.gpu("apple-m1-8-core-gpu-8gb").memory_bytes_per_s
    assert exact["0", "TPOT"] == pytest.approx(steps_ms(100) / 99 * BANDWIDTH / bytes_per_s)
    assert all(type(value) in (int, float, str, type(None)) for row in rows for value in row)


def test_every_model_has_a_chapter():
    for name in npinfer.presets():
        assert len(chapter(Setting.of(name, "a100-sxm-80gb"))) >= 110


def test_rows_of_experts():
    rows = {row.quantity: row for row in chapter(Setting.of("mixtral-8x7b-v0.1"))}
    once, idle = 46_702_792_704 - 32_000 * 4096, 32 * 6 * 3 * 14_336 * 4096
    assert rows["2*B*L*P, L = 1024"].formula == 2 * 1024 * (once - idle) / 1e12
    all_experts = rows["2*B*L*P of all experts, L = 128"]
    assert all_experts.formula == 2 * 128 * once / 1e12
    assert all_experts.exact == rows["2*B*L*P, L = 128"].exact and "2 of 8 experts" in all_experts.note
    # Singly a token reads 2 experts of 8, 1000 at once read all: far less than 1000 times.
    weights = rows["weights read, 1000 tokens singly / at once"]
    assert weights.exact == pytest.approx(1000 * (once - idle) / once, rel=1e-3)
    assert "more experts" in weights.note


def test_learned_positions_end_before_the_chapter_does():
    rows = chapter(Setting.of("gpt-2"))
    (learned,) = [row for row in rows if row.quantity == "positions that the model has learned"]
    assert learned.exact == 1024 and "longer table" in learned.note
    assert [row.exact for row in rows if row.quantity == "K and V rows computed with it"] == [1099]
    assert not [row for row in ROWS if row.quantity == learned.quantity]


@pytest.mark.parametrize("eta", [0, -0.1, 1.01, float("nan")])
def test_an_efficiency_that_cannot_be(eta):
    with pytest.raises(InputError, match="efficiency is .*expected above 0 and at most 1"):
        Setting.of(eta=eta)


# ---- the program


def run_tool(*arguments):
    command = [sys.executable, str(REPO / "tools" / "textbook.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line_in_three_forms(tmp_path):
    result = json.loads(run_tool("--format", "json").stdout)
    assert list(result) == ["rows"]
    assert [list(row) for row in result["rows"]] == [list(Row._fields)] * len(ROWS)
    assert [Row(**row) for row in result["rows"]] == ROWS
    assert run_tool("--section", "5", "--format", "csv", "--output", str(tmp_path / "rows.csv")).stdout == ""
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert [row["quantity"] for row in rows] == list(EXACT["5"])
    assert float(rows[0]["exact"]) == 14.221320192 / 1008 * 1e3
    assert rows[1]["text"] == ""


def test_the_commands_of_the_readme_and_of_help_are_accepted():
    readme, help_ = (REPO / "README.md").read_text(encoding="utf-8"), run_tool("--help").stdout
    commands = [re.findall(r"^ +\S*python tools/textbook\.py ?(.*?)(?: +#.*)?$", text, re.MULTILINE) for text in (readme,
        help_)]
    assert [len(found) for found in commands] == [3, 3]
    for command in sum(commands, []):
        assert run_tool(*command.split()).returncode == 0


@pytest.mark.parametrize("arguments", [(), ("--gpu", "a100-80gb-form-factor-unspecified"), ("--gpu",
    "apple-m1-8-core-gpu-8gb")])
def test_the_table_fits_120_columns(arguments):
    lines = run_tool(*arguments).stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert [line for line in lines if line != line.rstrip()] == []
    assert [line.partition(" ")[0] for line in lines if line[:1].isdecimal()] == list(SECTIONS)


@pytest.mark.parametrize("arguments, met", [
    (["--section", "12.3"], "no section '12.3'; known: 0, 1, 2.1"),
    (["--eta", "0"], "efficiency is 0.0, expected above 0 and at most 1"),
    (["--eta", "1.2", "--section", "4.1"], "efficiency is 1.2"),
    (["--eta", "5e-324", "--format", "json"], "efficiency is 5e-324, expected 1e-100 at least"),
    (["--eta", "much"], "much"),
    (["--gpu", "abacus"], "abacus"),
    (["--model", "llama-9"], "llama-9"),
    (["--output", "/nowhere/rows.json"], "/nowhere/rows.json"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, met):
    result = run_tool(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert met in result.stderr and len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr
