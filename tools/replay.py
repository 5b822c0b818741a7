#!/usr/bin/env python3
"""Replay a request trace through the prompt cache: hit rates, FLOPs saved, and TTFT with and without it.

    python tools/replay.py conversation.jsonl --capacity unbounded --capacity "10000 blocks" --capacity "64 GiB"
"""


from common import Parser, Progress, csv_text, run, scaled, seconds, table, write

import costmodel
import npinfer
from costmodel import formulas
from costmodel.replay import BLOCK_TOKENS, read_trace, replay
from npinfer.blocks import n_bytes


def parser():
    parser = Parser(prog="replay.py", description=__doc__)
    parser.add_argument("trace", metavar="TRACE.jsonl", help="one request a line: timestamp, input_length, output_length, hash_ids")
    parser.add_argument("--capacity", action="append", metavar="SIZE", help="bytes ('64 GB', '64 GiB'), 'N blocks' or 'unbounded' (default); may be repeated")
    parser.add_argument("--model", metavar="NAME", default="mistral-7b", help="a known shape (default mistral-7b)")
    parser.add_argument("--gpu", metavar="NAME|FILE.toml", default="h100-sxm", help="(default h100-sxm)")
    for name in ("weights", "kv", "activations"):
        parser.add_argument(f"--{name}", metavar="FORMAT", default="fp16", help="(default fp16)")
    parser.add_argument("--skip-bad-lines", action="store_true", help="go on without lines that cannot be read")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    parser.add_argument("--output", metavar="FILE", help="write there instead of printing")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    config, gpu = npinfer.preset(args.model), costmodel.gpu(args.gpu)
    precision = npinfer.Precision(args.weights, args.kv, args.activations)
    block_bytes = BLOCK_TOKENS * formulas.kv_bytes_per_token(config, precision)
    capacities = [capacity_bytes(text, block_bytes) for text in args.capacity or ["unbounded"]]
    try:
        with open(args.trace, encoding="utf-8", errors="replace") as file:
            requests, n_skipped = read_trace(file, args.skip_bad_lines)
    except npinfer.InputError as error:
        raise npinfer.InputError(f"{args.trace}: {error}") from None
    progress = Progress("request", len(requests) * len(capacities))
    result = {"trace": args.trace, "skipped_lines": n_skipped, "model": config.name, "gpu": gpu.name}
    result |= replay(requests, config, precision, gpu, capacities, progress)
    write(FORMATS[args.format](result), args.output)


def capacity_bytes(text, block_bytes):
    """Bytes of a capacity as the command line takes it; None is unbounded."""
    if text == "unbounded":
        return None
    number, _, unit = " ".join(text.split()).partition(" ")
    in_blocks = unit in ("block", "blocks") and number.isdecimal()
    capacity = int(number) * block_bytes if in_blocks else n_bytes("--capacity (a size, 'N blocks' or 'unbounded')", text)
    if capacity < block_bytes:
        raise npinfer.InputError(f"--capacity is {text!r}, expected one block of {block_bytes} bytes at least")
    return capacity


def rows_of(result):
    """One flat dict for each capacity."""
    for row in result["results"]:
        flat = {key: value for key, value in row.items() if key != "ttft_s"}
        for level, runs in row["ttft_s"].items():
            for run_, times in (runs or {}).items():
                flat |= {f"ttft_s.{level}.{run_}.{name}": value for name, value in times.items()}
        yield flat


def capacity_text(row):
    n = row["capacity_blocks"]
    return "unbounded" if n is None else "1 block" if n == 1 else f"{n:,} blocks"


def as_text(result):
    skipped = f" ({result['skipped_lines']} lines skipped)" if result["skipped_lines"] else ""
    lines = [
        f"{result['trace']}: {result['requests']:,} requests, {result['blocks']:,} blocks of {BLOCK_TOKENS} tokens{skipped}; "
        f"{result['model']} on {result['gpu']}"
    ]
    rows = []
    for row in result["results"]:
        blocks = capacity_text(row)
        rows.append(
            [
                blocks, f"{row['block_hit_rate']:.2%}", f"{row['token_hit_rate']:.2%}", f"{row['evicted_blocks']:,}",
                scaled(row["peak_bytes"], "B"), f"{row['flops_saved_share']:.2%}",
            ]
        )  # fmt: skip
    lines.append(table(rows, ["capacity", "blocks hit", "tokens hit", "evicted", "peak held", "FLOPs saved"]))
    times = []
    for row in result["results"]:
        blocks = capacity_text(row)
        for level, runs in row["ttft_s"].items():
            if runs:
                times.append([f"{blocks}, {level}", *[seconds(runs[run_][p]) for p in ("p50", "p90", "p99") for run_ in ("cold", "warm")]])
    if times:
        lines.append(table(times, ["TTFT", "p50 cold", "warm", "p90 cold", "warm", "p99 cold", "warm"]))
    else:
        lines.append(f"{result['gpu']}: no TTFT, the profile lacks the matmul rate")
    agrees = "agrees" if result["closed_form"]["agrees"] else "DISAGREES: this is a fault of the program, please report it"
    lines.append(f"closed form against shape-only runs of a sample: {agrees}")
    return "\n\n".join(lines)


def as_json(result):
    import json

    return json.dumps(result, indent=1)


def as_csv(result):
    rows = list(rows_of(result))
    return csv_text(rows[0], [row.values() for row in rows])


FORMATS = {"table": as_text, "json": as_json, "csv": as_csv}


if __name__ == "__main__":
    run(main)
