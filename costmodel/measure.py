"""Timing on this machine: things that are compared run in turns, so that what disturbs one disturbs the other.

`alternate` is the stopwatch; the rest is what it is pointed at: streaming of
memory, matrix products, an operation that does next to nothing, and the matrix
products of a model without anything around them.
"""

from statistics import median
from time import perf_counter

import numpy as np

import npinfer
from npinfer import activations, ops
from npinfer.specs import Array, spec

FP32 = npinfer.Precision("fp32", "fp32", "fp32")
WARM_UP = 2  # runs that are not timed: threads start, memory comes in


def alternate(*functions, repeats=15, before=None):
    """Seconds of each function, run in turns.

    Parameters
    ----------
    *functions : callables without arguments
    repeats : int
    before : callable, optional
        Run before each, untimed.

    Returns
    -------
    list of lists of float
        One list of `repeats` times for each function.
    """
    times_s = [[] for _ in functions]
    for turn in range(WARM_UP + repeats):
        for function, measured in zip(functions, times_s):
            if before is not None:
                before()
            start_s = perf_counter()
            function()
            if turn >= WARM_UP:
                measured.append(perf_counter() - start_s)
    return times_s


def ratio(times_s, others_s):
    """How many times as long the first took as the second, by their medians."""
    return median(times_s) / median(others_s)


def matrices(model):
    """The `Matrix` of every product of one forward of a dense numeric model, in the order they run."""
    found = []
    for _, _, layer in model.weights.layers:
        found += [layer.attention.qkv, layer.attention.o_proj, layer.mlp.gate_up, layer.mlp.down_proj]
    return [array.data for array in (*found, model.weights.lm_head)]


def products(model, n_tokens):
    """A function that runs the matrix products of a forward over `n_tokens`, the head for the last one, and nothing else."""
    every = matrices(model)
    widths = {matrix.rows.shape[1] for matrix in every}
    inputs = {width: np.ones((n_tokens, width), np.float32) for width in widths}

    def run():
        for matrix in every[:-1]:
            ops.product(inputs[matrix.rows.shape[1]], matrix)
        ops.product(inputs[every[-1].rows.shape[1]][:1], every[-1])

    return run


def streaming_bytes_per_s(n_bytes, repeats=7):
    """Bytes per second at which a product of one row with a float32 matrix of so many bytes reads it.

    It is what a decode step does with its weights; BLAS's own threads read.
    """
    matrix = np.ones((max(1, n_bytes // 4 // 1024), 1024), np.float32)
    row = np.ones((1, 1024), np.float32)
    passes = max(1, 2**24 // matrix.nbytes)

    def stream():
        for _ in range(passes):
            row @ matrix.T

    (times_s,) = alternate(stream, repeats=repeats)
    return passes * matrix.nbytes / min(times_s)


def matmul_flops_per_s(n_rows, d=2048, repeats=5):
    """FLOPs per second of a float32 product (n_rows, d) @ (d, d)."""
    x, w = np.ones((n_rows, d), np.float32), np.ones((d, d), np.float32)
    (times_s,) = alternate(lambda: x @ w.T, repeats=repeats)
    return 2 * n_rows * d * d / min(times_s)


def vector_flops_per_s(repeats=7):
    """FLOPs per second of SwiGLU, 4 for each element, on rows that a cache holds."""
    gate, up = np.ones((64, 1024), np.float32), np.ones((64, 1024), np.float32)
    body = activations.swiglu.__wrapped__
    (times_s,) = alternate(lambda: body(gate, up), repeats=repeats)
    return 4 * gate.size / min(times_s)


def record_s(repeats=9):
    """Seconds that the ledger takes for one operation: with it, less without it."""
    x = Array(spec((1, 2), npinfer.Precision().activations), np.ones((1, 2), np.float32))

    def run():
        for _ in range(2000):
            ops.attn_residual(x, x)

    def recorded():
        with npinfer.Ledger():
            run()

    with_it, without = alternate(recorded, run, repeats=repeats)
    return (min(with_it) - min(without)) / 2000


def operation_s(memory_bytes_per_s, repeats=25):
    """Seconds of an operation beside the bytes it streams, in the mean of a decode step.

    A step of a model of 512 columns less its weights' bytes at full bandwidth:
    Python and NumPy between the products, which find their code and data
    evicted by the weights, and the start and end of each product.
    """
    config = npinfer.ModelConfig(n_layers=8, d_model=512, n_heads=8, d_ff=1376, vocab_size=8192)
    model = npinfer.Transformer.random(config, precision=FP32)
    cache = model.new_cache(capacity=repeats + WARM_UP + 33)
    model.prefill(np.zeros((1, 32), int), cache)
    with npinfer.Ledger() as ledger:
        model.decode([0], cache)
    n_operations = sum([entry.calls for entry in ledger.entries()])

    def step():
        with npinfer.Ledger():
            model.decode([0], cache)

    (times_s,) = alternate(step, repeats=repeats)
    return max(0.0, median(times_s) - ledger.total().weight_bytes_read / memory_bytes_per_s) / n_operations
