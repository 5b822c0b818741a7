"""The line: latency = b + k * n_output, what makes b and k, and where it bends (the textbook's sections 6 to 8).

Read `step_s` and `prefill_s` (k and b at one length), `latency_line` (a fit
through a sweep), then the lengths at which one thing overtakes another.  Each
is the first whole number for which a condition holds that goes on holding, and
None if a rate is missing or there is none up to 2**24 tokens.

Times are those of a level of `costmodel.predict`, "floor" unless another is named.
"""

from typing import NamedTuple

from costmodel import formulas, loads, operations
from costmodel.arguments import whole_numbers
from costmodel.prediction import predict
from costmodel.profiles import gpu as gpu_profile
from costmodel.search import first_where
from npinfer import Precision
from npinfer.errors import InputError, UnknownName

LEVELS = ("floor", "roofline")


class Line(NamedTuple):
    """A straight line through the latencies of a sweep of output lengths.

    Attributes
    ----------
    b_s : float
        Seconds where the line meets n_output = 0: TTFT less one step, since the prefill gives the first token.
    k_s : float
        Seconds for each output token.
    r2 : float
        Share of the variance that the line explains.
    bend : float
        How much longer the sweep's last decode step takes than its first, relative.
    """

    b_s: float
    k_s: float
    r2: float
    bend: float


def prefill_s(config, precision, gpu, n_prompt, level="floor", batch=1, compute=None):
    """TTFT of a prompt in seconds, or None without a matmul rate."""
    return _at(level, predict(config, precision, gpu, n_prompt, 1, batch, compute=compute)).ttft_s


def step_s(config, precision, gpu, n_context, level="floor", batch=1, compute=None):
    """Seconds of the decode step whose token sees `n_context` positions, itself included; 2 at least."""
    n_context = whole_numbers("n_context", n_context, 2)
    return _at(level, predict(config, precision, gpu, n_context - 1, 2, batch, compute=compute)).tpot_s


def _at(level, prediction):
    if level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    return getattr(prediction, level)


def latency_line(config, precision, gpu, n_prompt, n_outputs, level="floor", batch=1, compute=None):
    """The line through the exact latencies of a sweep of output lengths.

    Parameters
    ----------
    config, precision, gpu, n_prompt, batch, compute
        As for `costmodel.predict`.
    n_outputs : iterable of int
        Two different lengths at least.
    level : {"floor", "roofline"}

    Returns
    -------
    Line or None
        None without a matmul rate.

    Notes
    -----
    Each latency is TTFT plus the sum of all its decode steps, so the points lie
    on a slight parabola: each step reads one more token's KV than the last.
    """
    n_outputs = [whole_numbers("n_output", n, 1) for n in n_outputs]
    gpu = gpu_profile(gpu)
    latencies = [
        _at(level, predict(config, precision, gpu, n_prompt, n, batch, compute=compute)).latency_exact_s for n in n_outputs
    ]
    if None in latencies:
        return None
    line = formulas.fit_latency_line(n_outputs, latencies)
    first, last = [step_s(config, precision, gpu, n_prompt + n, level, batch, compute) for n in (1, max(n_outputs) - 1)]
    return Line(*line, bend=last / first - 1)


def bend_n_context(config, precision, gpu, n_prompt, excess=0.1, level="floor", batch=1, compute=None):
    """Context from which a decode step takes `excess` longer than the first step after the prompt."""
    _positive("excess", excess)
    gpu = gpu_profile(gpu)

    def step(n_context):
        return step_s(config, precision, gpu, n_context, level, batch, compute)

    first = step(n_prompt + 1)
    return first_where(lambda n_context: step(n_context) >= (1 + excess) * first, start=n_prompt + 1)


def breakeven_n_prompt(config, precision, gpu, n_output=10, level="floor", batch=1, compute=None):
    """Prompt length from which the prefill takes longer than `n_output` decode steps: b > n_output * k.

    k is the first step after the prompt.  `formulas.breakeven_n_output` is the same balance
    for a given prompt.
    """
    _positive("n_output", n_output)
    gpu = gpu_profile(gpu)

    def surplus_s(n_prompt):
        times = _at(level, predict(config, precision, gpu, n_prompt, 2, batch, compute=compute))
        return None if times.ttft_s is None else times.ttft_s - n_output * times.tpot_s

    return None if surplus_s(1) is None else first_where(lambda n_prompt: surplus_s(n_prompt) > 0)


def compute_bound_n_prompt(config, precision, gpu, batch=1, compute=None):
    """Prompt length from which the prefill is bound by compute: its intensity passes the ridge of the roofline."""
    gpu = gpu_profile(gpu)

    def excess(n_prompt):
        prediction = predict(config, precision, gpu, n_prompt, 1, batch, compute=compute)
        return None if prediction.ridge is None else prediction.prefill.intensity - prediction.ridge

    return None if excess(1) is None else first_where(lambda n_prompt: excess(n_prompt) > 0)


def kv_equals_weights_n_context(config, precision, batch=1):
    """Context from which a decode step reads as many bytes of KV as of weights."""
    weights = formulas.weight_bytes(config, precision, streamed=True)
    return first_where(lambda n_context: formulas.kv_bytes_read(config, precision, n_context, batch) >= weights)


class PrefillFlops(NamedTuple):
    """Needed matrix FLOPs of a prefill: what grows with the prompt, with its square, and not at all."""

    projections: int
    attention: int
    head: int


def prefill_flops(config, n_prompt, batch=1):
    """`PrefillFlops` of a prompt; their sum is the needed FLOPs of `formulas.forward_counts`."""
    n_prompt, batch = whole_numbers("n_prompt", n_prompt, 1), whole_numbers("batch", batch, 1)
    load = loads.forward_load(config, Precision(), batch, 0, n_prompt)
    needed = {op: counts.needed_flops for op, counts in operations.operation_counts(config, Precision(), load).items()}
    attention, head = needed["attn_scores"] + needed["attn_mix"], needed["lm_head"]
    return PrefillFlops(sum(needed.values()) - attention - head, attention, head)


def attention_n_prompt(config, excess=0.1):
    """Prompt length from which attention adds `excess` to the FLOPs that grow linearly, those of the projections."""
    _positive("excess", excess)

    def adds(n_prompt):
        flops = prefill_flops(config, n_prompt)
        return flops.attention >= excess * flops.projections

    return first_where(adds)


class RoughGap(NamedTuple):
    """Exact needed FLOPs of a prefill minus the rough 2*B*L*P; the difference is the sum of the last four.

    Attributes
    ----------
    exact, rough, difference : int
    attention : int
        Left out by the estimate.
    head : int
        Runs for the last position only; the estimate has it at each (negative).
    vectors : int
        Gains and biases, which are no matrices (negative).
    embedding : int
        A table that is looked up; in the estimate if P counts it (negative).
    """

    exact: int
    rough: int
    difference: int
    attention: int
    head: int
    vectors: int
    embedding: int


def rough_prefill_gap(config, n_prompt, batch=1, n_params=None):
    """What the rough 2*B*L*P leaves out and counts too much; `RoughGap`.

    `n_params` is P: n_token_parameters unless given, of which an untied embedding is no part.
    """
    streamed = formulas.n_token_parameters(config)
    n_params = streamed if n_params is None else n_params
    flops = prefill_flops(config, n_prompt, batch)
    exact, rough = sum(flops), formulas.prefill_flops_rough(batch, n_prompt, n_params)
    head = flops.head * (1 - n_prompt)
    embedding = formulas.prefill_flops_rough(batch, n_prompt, streamed) - rough
    rest = exact - rough - flops.attention - head - embedding
    return RoughGap(exact, rough, exact - rough, flops.attention, head, rest, embedding)


def _positive(name, value):
    if not 0 < value < float("inf"):
        raise InputError(f"{name} is {value}, expected a positive number")
