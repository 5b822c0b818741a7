#!/usr/bin/env python3
"""Time the interpreter against its own matrix products and against this machine, side by side in one run.

    python tools/bench.py
    python tools/bench.py --shapes 512x8 --repeats 30 --format json

Every ratio is of medians, of things that were run in turns (16 decode steps,
16 times their products, and so on): how many times as long a decode step, or
a prefill, takes as a loop of only its matrix products on the same weights; the
same with and without a ledger; a prefill from cached rows and a cold one.
Nothing here is asserted by a test.
"""

import json
import os
import platform
import subprocess
import sys
from statistics import median

import numpy as np
from common import Parser, Progress, run, seconds, table, write

import costmodel
import npinfer
from costmodel import measure
from npinfer.checks import whole
from npinfer.generate import no_tokens

# d_model x layers: heads, KV heads, d_ff, vocab
SHAPES = {
    "288x6": (6, 6, 768, 32000),
    "512x8": (8, 8, 1376, 8192),
    "2048x8": (32, 8, 5632, 32000),
    "4096x1": (32, 8, 14336, 32000),
}
N_PREFILL = 512  # tokens of a timed prefill
CONTEXTS = range(32, 96)  # tokens in the cache when steps are timed


def parser():
    parser = Parser(prog="bench.py", description=__doc__)
    parser.add_argument("--shapes", metavar="NAMES", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default all)")
    parser.add_argument("--repeats", type=int, default=64, metavar="N", help="decode steps timed of each kind (default 64)")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", metavar="FILE", help="write there instead of printing")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    repeats = whole("--repeats", args.repeats, most=2**12)
    names = args.shapes.split(",")
    for name in names:
        if name not in SHAPES:
            raise npinfer.UnknownName("shape", name, SHAPES)
    progress = Progress("measured", 2 + len(names))
    result = {"host": host(), "programs": programs()}
    progress()
    result["shapes"] = {}
    for name in names:
        result["shapes"][name] = of_shape(name, result["host"]["memory_bytes_per_s"], repeats)
        progress()
    result["shape_only"] = shape_only()
    progress()
    write(json.dumps(result, indent=1) if args.format == "json" else as_text(result), args.output)


def host():
    """What was measured on, and its rates."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": platform.processor() or platform.machine(),
        "n_cpus": os.cpu_count(),
        "threads": os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "library default",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name')} {blas.get('version')}",
        "memory_bytes_per_s": measure.streaming_bytes_per_s(2**28),
        "matmul_flops_per_s": measure.matmul_flops_per_s(N_PREFILL),
        "record_s": measure.record_s(),
    }


def programs():
    """Seconds of whole processes: an interpreter that imports NumPy, and what this project adds to that."""
    here = os.path.dirname(os.path.abspath(__file__))
    commands = {
        "numpy": ["-c", "import numpy"],
        "import npinfer, costmodel": ["-c", "import npinfer, costmodel"],
        "default trace": [os.path.join(here, "trace.py")],
    }
    starts = [
        lambda command=command: subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
        for command in commands.values()
    ]
    times_s = [median(each) for each in measure.alternate(*starts, repeats=7)]
    return {name: time_s - (times_s[0] if name != "numpy" else 0) for name, time_s in zip(commands, times_s)}


def of_shape(name, memory_bytes_per_s, repeats):
    """Ratios of one shape."""
    d_model, n_layers = map(int, name.split("x"))
    n_heads, n_kv_heads, d_ff, vocab_size = SHAPES[name]
    config = npinfer.ModelConfig(n_layers, d_model, n_heads, d_ff, vocab_size, n_kv_heads=n_kv_heads, name=name)
    model = npinfer.Transformer.random(config, precision=measure.FP32)
    cache = model.new_cache(capacity=CONTEXTS.stop)
    model.prefill(np.zeros((1, CONTEXTS.start), int), cache)

    def step():
        if cache.length == CONTEXTS.stop:
            cache.crop(CONTEXTS.start)
        model.decode([0], cache)

    def recorded_step():
        with npinfer.Ledger():
            step()

    products = measure.products(model, 1)
    bare, recorded, silent = measure.alternate(products, recorded_step, step, repeats=repeats, in_a_row=measure.STEPS)
    prompt = np.arange(N_PREFILL)[None] % vocab_size
    cold, products, warm = measure.alternate(
        lambda: model.prefill(prompt, model.new_cache()),
        measure.products(model, N_PREFILL),
        _cached_start(model, prompt),
        repeats=3,
    )
    streamed = costmodel.formulas.weight_bytes(config, measure.FP32, streamed=True)
    return {
        "decode_over_matmuls": measure.ratio(recorded, bare),
        "prefill_over_matmuls": measure.ratio(cold, products),
        "ledger_on_over_off": measure.ratio(recorded, silent),
        "decode_share_of_bandwidth": streamed / memory_bytes_per_s / median(recorded),
        "cached_over_cold_prefill": measure.ratio(warm, cold),
        "tokens_per_s": 1 / median(recorded),
        "tpot_s": median(recorded),
        "ttft_s": median(cold),
    }


def _cached_start(model, prompt):
    """A prefill of the prompt of which all but the last 32 tokens are in a cache."""
    prefixes = npinfer.PrefixCache(model)
    prefixes.add(prompt[0, :-32])
    return lambda: prefixes.prefill(prompt).release()


def shape_only():
    """Seconds of counting without arrays, at the shape of Mistral 7B."""
    config, precision = npinfer.preset("mistral-7b"), npinfer.Precision()
    model = npinfer.Transformer.shape_only(config, precision)
    cache, tokens = model.new_cache(), no_tokens((1, 1000))
    with npinfer.Ledger() as ledger:
        model.prefill(tokens, cache)
        n_operations = len(list(ledger.entries()))

    def step():
        with npinfer.Ledger():
            cache.crop(1000)
            model.decode([0], cache)

    contexts = np.arange(10**6)
    steps_s, predictions_s = measure.alternate(
        lambda: [step() for _ in range(20)],
        lambda: [costmodel.predict(config, precision, "rtx-4090") for _ in range(20)],
        repeats=25,
    )
    (points_s,) = measure.alternate(lambda: costmodel.formulas.forward_counts(config, precision, 1, contexts, 1), repeats=9)
    return {
        "decode_step_s": median(steps_s) / 20,
        "operation_s": median(steps_s) / 20 / n_operations,
        "closed_form_points_per_s": len(contexts) / median(points_s),
        "prediction_s": median(predictions_s) / 20,
    }


def as_text(result):
    rates, lines = result["host"], []
    lines.append(f"{rates['cpu']}, {rates['n_cpus']} CPUs, threads: {rates['threads']}")
    lines.append(f"Python {rates['python']}, NumPy {rates['numpy']}, {rates['blas']}")
    lines.append(
        f"memory {rates['memory_bytes_per_s'] / 1e9:.1f} GB/s, products {rates['matmul_flops_per_s'] / 1e9:.1f} GFLOP/s, "
        f"recording an operation {seconds(rates['record_s'])}"
    )
    rows = {
        "decode step / its matrix products": ("decode_over_matmuls", "{:.3f}"),
        f"prefill of {N_PREFILL} / its matrix products": ("prefill_over_matmuls", "{:.3f}"),
        "ledger on / off": ("ledger_on_over_off", "{:.3f}"),
        "weights at full bandwidth / step": ("decode_share_of_bandwidth", "{:.2f}"),
        "prefill from cached rows / cold": ("cached_over_cold_prefill", "{:.3f}"),
        "tokens per second": ("tokens_per_s", "{:.1f}"),
    }
    shapes = result["shapes"]
    cells = [(label, *[form.format(each[key]) for each in shapes.values()]) for label, (key, form) in rows.items()]
    lines += ["", table(cells, ("", *shapes))]
    counted = result["shape_only"]
    lines += ["", table([
        ("shape-only step, 7B", seconds(counted["decode_step_s"])),
        ("one operation of it", seconds(counted["operation_s"])),
        ("closed-form points", f"{counted['closed_form_points_per_s'] / 1e6:.1f} million/s"),
        ("one prediction", seconds(counted["prediction_s"])),
        *[
            (f"process: {name}{' beyond that' if name != 'numpy' else ''}", seconds(time_s))
            for name, time_s in result["programs"].items()
        ],
    ])]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
