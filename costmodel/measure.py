"""Timing on this machine: things that are compared run in turns, so that what disturbs one disturbs the other.

`alternate` is the stopwatch; the rest is what it is pointed at: streaming of
memory, matrix products, an operation that does next to nothing, and the matrix
products of a model without anything around them.
"""

from statistics import median
from time import perf_counter

import numpy as np

import npinfer
from costmodel.interpreter import SCORE_FLOPS
from npinfer import ops
from npinfer.attention import attention
from npinfer.errors import InputError
from npinfer.products import product
from npinfer.specs import Array, spec

FP32 = npinfer.Precision("fp32", "fp32", "fp32")
WARM_UP = 2  # runs that are not timed: threads start, memory comes in
STEPS = 16  # decode steps in a row


def alternate(*functions, repeats=15, before=None, in_a_row=1):
    """Seconds of each function, run in turns.

    Parameters
    ----------
    *functions : callables without arguments
    repeats : int
    before : callable, optional
        Run before each, untimed.
    in_a_row : int
        Runs of a function in each turn: what is used in a loop of its own, as a
        decode step is, finds in the caches what it left there itself.

    Returns
    -------
    list of lists of float
        One list of at least `repeats` times for each function, whole turns.
    """
    times_s = [[] for _ in functions]
    for turn in range(1 + -(-repeats // in_a_row)):
        for function, measured in zip(functions, times_s):
            for _ in range(max(WARM_UP, in_a_row) if turn == 0 else in_a_row):
                if before is not None:
                    before()
                start_s = perf_counter()
                function()
                if turn:
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
            product(inputs[matrix.rows.shape[1]], matrix)
        product(inputs[every[-1].rows.shape[1]][:1], every[-1])

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


def record_s(repeats=41):
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


def interpreter(memory_bytes_per_s, matmul_flops_per_s, n_prompt=512):
    """The rates of the interpreter itself, as `costmodel.interpreter` adds them up, and its elementwise one.

    From decode steps and prefills of a small model beside their products alone,
    from products of a few rows, and from attention over long contexts and short ones.
    """
    config = npinfer.ModelConfig(n_layers=8, d_model=512, n_heads=8, d_ff=1376, vocab_size=8192)
    model = npinfer.Transformer.random(config, precision=FP32)
    step, entries = _recorded_step(model)
    n_operations = sum([entry.calls for entry in entries])
    n_products = sum([entry.calls for entry in entries if entry.counts.matmul_flops and entry.counts.weight_bytes_read])
    step_s, products_s = map(median, alternate(step, products(model, 1), repeats=64, in_a_row=STEPS))
    streamed_s = sum([matrix.rows.nbytes for matrix in matrices(model)]) / memory_bytes_per_s
    rates = {
        "operation_s": _positive("a step", step_s - products_s) / n_operations,
        "product_s": max(1e-9, (products_s - streamed_s) / n_products),  # a large cache may hold them all
        "packing_bytes_per_s": packing_bytes_per_s(matmul_flops_per_s),
        "kv_bytes_per_s": kv_bytes_per_s(),
    }
    prompt = np.zeros((1, n_prompt), int)
    prefill, bare = (lambda: model.prefill(prompt, model.new_cache())), products(model, n_prompt)
    prefill_s, bare_s = map(min, alternate(prefill, bare, repeats=10))  # what else the machine does adds to few long runs
    with npinfer.Ledger() as ledger:
        prefill()
    skipped_scores = ledger.total().masked_flops // (4 * config.head_dim)
    attention_flops = sum([ledger.total(op=op).needed_flops for op in ("attn_scores", "attn_mix")])
    elementwise_s = prefill_s - bare_s - attention_flops / matmul_flops_per_s - n_operations * rates["operation_s"]
    elementwise_flops = ledger.total().elementwise_flops - SCORE_FLOPS * skipped_scores
    return rates, elementwise_flops / _positive("a prefill", elementwise_s)


def _positive(what, seconds):
    """What was left of a time when others were taken off, if anything was."""
    if seconds <= 0:
        raise InputError(f"{what} took less than its parts: the machine does other things at once; measure when it does not")
    return seconds


def _recorded_step(model):
    """A function that makes a recorded decode step from a short context, and the entries of one."""
    cache = model.new_cache(capacity=64)
    model.prefill(np.zeros((1, 32), int), cache)

    def step():
        cache.crop(32)
        with npinfer.Ledger() as ledger:
            model.decode([0], cache)
        return ledger

    return step, list(step().entries())


def packing_bytes_per_s(matmul_flops_per_s, n_rows=16, d=2048, repeats=9):
    """Bytes of weights per second that a product of few rows takes beside its arithmetic."""
    x, several = np.ones((n_rows, d), np.float32), [np.ones((2 * d, d), np.float32) for _ in range(4)]

    def run():
        for w in several:
            x @ w.T

    (times_s,) = alternate(run, repeats=repeats)
    nbytes = sum([w.nbytes for w in several])
    computing_s = 2 * n_rows * nbytes / 4 / matmul_flops_per_s
    return nbytes / _positive("a product of few rows", median(times_s) - computing_s)


def kv_bytes_per_s(n_keys=2048, n_few=16, repeats=9):
    """Bytes of keys and values per second that attention of one query reads: what many take longer than few."""
    n_heads, head_dim, n_layers = 8, 64, 8
    q = np.ones((1, n_heads, 1, head_dim), np.float32)
    rows = np.ones((n_layers, 2, 1, n_heads, n_keys, head_dim), np.float32)
    attend = attention.fixed(scale=0.125, window=None).__wrapped__

    def over(n):
        for k, v in rows[..., :n, :]:
            attend(q, k, v, None)

    many_s, few_s = map(median, alternate(lambda: over(n_keys), lambda: over(n_few), repeats=repeats))
    return rows[..., n_few:, :].size * 4 / _positive("attention over many keys", many_s - few_s)
