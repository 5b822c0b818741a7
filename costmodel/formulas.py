"""Closed forms: counts and times of inference, each a plain function.

Read in three parts: what a model weighs (`costmodel.sizes`), what running it
costs (`forward_counts`, `decode_counts_total`), and the textbook's formulas for
time.  Numeric arguments may be NumPy arrays, which broadcast; counts of whole
numbers are Python ints, and arrays whose counts would pass 2**63 raise
OverflowError instead of wrapping.
"""

from itertools import pairwise

import numpy as np

from costmodel import loads, operations
from costmodel.arguments import most, refuse_overflow, whole_numbers
from costmodel.sizes import (
    kv_bytes_held,
    kv_bytes_per_token,
    kv_bytes_read,
    kv_elements_per_token,
    n_active_parameters,
    n_parameters,
    n_streamed_parameters,
    n_token_parameters,
    weight_bytes,
)
from npinfer.errors import InputError
from npinfer.ledger import Counts

__all__ = [
    "breakeven_n_output",
    "decode_counts_total",
    "decode_flops_rough",
    "effective_flops_per_s",
    "fit_latency_line",
    "forward_counts",
    "kv_bytes_held",
    "kv_bytes_per_token",
    "kv_bytes_read",
    "kv_elements_per_token",
    "latency_exact_s",
    "latency_s",
    "n_active_parameters",
    "n_parameters",
    "n_streamed_parameters",
    "n_token_parameters",
    "prefill_flops_rough",
    "prefix_saving",
    "sample_counts",
    "token_times",
    "tokens_per_s",
    "tpot_floor_s",
    "ttft_floor_s",
    "weight_bytes",
]

# --- what running it costs -------------------------------------------------


@refuse_overflow
def forward_counts(config, precision, batch, n_cached, n_new, all_logits=False, experts_touched="expected"):
    """The ten counts of one forward over `n_new` tokens of each sequence, on top of `n_cached`.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    batch, n_cached, n_new : int or integer array
    all_logits : bool
        Whether the head runs at every position instead of the last one.
    experts_touched : {"expected", "all"} or list of int
        How many experts' weights are read: round(bytes of all E experts *
        (1 - (1 - k/E)**N)) in each layer and projection, N = batch * n_new, in
        Python's floats; or all; or the number observed in each sparse layer.

    Returns
    -------
    npinfer.Counts
        Of ints, or of int64 arrays of the broadcast shape.  Sampling is not
        in it, see `sample_counts`.

    Raises
    ------
    InputError
        If a number is not whole, `n_cached` negative or another below 1, or if
        `experts_touched` are not one number from 1 to E for each sparse layer.
    OverflowError
        If arrays would give a count of 2**63 or more.
    """
    load = loads.forward_load(
        config,
        precision,
        whole_numbers("batch", batch, 1),
        whole_numbers("n_cached", n_cached, 0),
        whole_numbers("n_new", n_new, 1),
        all_logits,
        experts_touched,
    )
    return operations.total_counts(config, precision, load)


@refuse_overflow
def decode_counts_total(config, precision, batch, n_prompt, n_output, experts_touched="expected"):
    """The ten counts of a whole decode: n_output - 1 steps, the i-th on a context of n_prompt + i.

    The first output token is the prefill's.  No loop over tokens: see
    `costmodel.loads`.  Parameters, results and errors as `forward_counts`, but
    that experts touched are "expected" or "all", since steps differ in what is
    observed; sampling is left out.
    """
    if not isinstance(experts_touched, str):
        raise InputError("experts_touched differ from step to step, expected 'expected' or 'all'; add up forward_counts")
    load = loads.decode_load(
        config,
        precision,
        whole_numbers("batch", batch, 1),
        whole_numbers("n_prompt", n_prompt, 1),
        whole_numbers("n_output", n_output, 1) - 1,
        experts_touched,
    )
    return operations.total_counts(config, precision, load)


@refuse_overflow
def sample_counts(config, precision, batch):
    """Counts of greedy sampling after one forward: vocab_size - 1 comparisons in each sequence."""
    counts = operations.sample_counts(config, precision, whole_numbers("batch", batch, 1))
    return counts if np.ndim(batch) == 0 else Counts(*np.broadcast_arrays(*counts))


# --- the textbook's formulas -----------------------------------------------


@refuse_overflow
def prefill_flops_rough(batch, n_prompt, n_params):
    """2*B*L*P: two FLOPs for each parameter and prompt token; leaves out attention's T x S products."""
    _refuse_negative("of them", batch=batch, n_prompt=n_prompt, n_params=n_params)
    return 2 * batch * n_prompt * n_params


@refuse_overflow
def decode_flops_rough(batch, n_output, n_params):
    """2*B*C*P: two FLOPs for each parameter and output token; leaves out attention's products."""
    _refuse_negative("of them", batch=batch, n_output=n_output, n_params=n_params)
    return 2 * batch * n_output * n_params


def effective_flops_per_s(peak, eta):
    """eta * peak: the share of the peak rate that real kernels reach.

    >>> effective_flops_per_s(312e12, 0.6)
    187200000000000.0
    """
    if not _everywhere((0 < eta) & (eta <= 1)):
        raise InputError(f"efficiency is {eta}, expected above 0 and at most 1")
    if not _everywhere(peak > 0):
        raise InputError(f"peak is {peak}, expected a positive rate")
    return peak * eta


def ttft_floor_s(flops, flops_per_s, bytes_moved=0, memory_bytes_per_s=float("inf")):
    """Seconds below which no prefill ends: its FLOPs at the peak, or its bytes at the bandwidth."""
    return most(_rate(flops, flops_per_s), _rate(bytes_moved, memory_bytes_per_s))


def tpot_floor_s(bytes_moved, memory_bytes_per_s, flops=0, flops_per_s=float("inf")):
    """Seconds below which no decode step ends: its bytes at the bandwidth, or its FLOPs at the peak.

    >>> round(tpot_floor_s(14.2e9, 1008e9), 4)
    0.0141
    """
    return most(_rate(bytes_moved, memory_bytes_per_s), _rate(flops, flops_per_s))


def _rate(amount, per_s):
    if not _everywhere((amount >= 0) & (per_s > 0)):
        raise InputError(f"{amount} at {per_s} per second, expected an amount of 0 or more and a positive rate")
    return amount / per_s


def latency_s(ttft_s, tpot_s, n_output):
    """ttft + tpot * n_output, the textbook's line; it counts one step more than are taken."""
    _refuse_negative("seconds", ttft_s=ttft_s, tpot_s=tpot_s)
    return ttft_s + tpot_s * whole_numbers("n_output", n_output, 1)


def latency_exact_s(ttft_s, tpot_s, n_output):
    """ttft + tpot * (n_output - 1): the first token is the prefill's."""
    return latency_s(ttft_s, tpot_s, n_output) - tpot_s


def tokens_per_s(ttft_s, tpot_s, n_output):
    """n_output / latency of one sequence: n_output / ttft for few tokens, 1 / tpot for many."""
    latency = latency_s(ttft_s, tpot_s, n_output)
    if not _everywhere(latency > 0):
        raise InputError(f"latency is {latency} s, expected more than 0: nothing is generated in no time")
    return n_output / latency


def token_times(start_s, token_times_s):
    """TTFT and TPOT from the moments at which tokens came out.

    Returns
    -------
    ttft_s : float
    tpot_s : float or None
        Mean of the gaps between tokens; None for a single token, which has none.
    """
    if not len(token_times_s) or any(b < a for a, b in pairwise([start_s, *token_times_s])):
        raise InputError(f"token times are {token_times_s} from {start_s}, expected one at least, in the order of time")
    first, last, n_gaps = token_times_s[0], token_times_s[-1], len(token_times_s) - 1
    return first - start_s, (last - first) / n_gaps if n_gaps else None


def prefix_saving(n_prefix, n_user):
    """n_user / (n_prefix + n_user): the share of the prefill's cost that is left once the prefix is cached.

    The textbook's estimate; it takes cost as linear in length, so it leaves
    out that the user's part still attends to the prefix, and that the weights
    are streamed however few tokens are computed.
    """
    n_prefix, n_user = whole_numbers("n_prefix", n_prefix, 0), whole_numbers("n_user", n_user, 0)
    n_prompt = 1.0 * n_prefix + n_user  # a sum of floats does not wrap
    if not _everywhere(n_prompt > 0):
        raise InputError("the prompt is empty: n_prefix and n_user are 0, expected 1 token at least")
    return n_user / n_prompt


def fit_latency_line(n_output, latency_s):
    """The straight line b + k * n_output through measured or predicted latencies, by least squares.

    Returns
    -------
    b : float
        Seconds before the first token.
    k : float
        Seconds for each token.
    r2 : float
        Share of the variance that the line explains; 1 where all points lie on it.
    """
    x, y = np.ravel(n_output).astype(np.float64), np.ravel(latency_s).astype(np.float64)
    if x.shape != y.shape or len(set(x.tolist())) < 2:
        raise InputError(f"a line through {x.size} points needs two different n_output at least, and a latency for each")
    for name, values, least in (("n_output", x, 1), ("latency_s", y, 0)):
        if not _everywhere((values >= least) & (values < float("inf"))):
            raise InputError(f"{name} is {values.tolist()}, expected finite numbers from {least}")
    dx, dy = x - x.mean(), y - y.mean()
    k = float(dx @ dy / (dx @ dx))
    b = float(y.mean() - k * x.mean())
    residual = y - (b + k * x)
    variance = float(dy @ dy)
    return b, k, 1.0 - float(residual @ residual) / variance if variance else 1.0


def breakeven_n_output(ttft_s, tpot_s):
    """Output tokens for which decoding takes as long as the prefill; beyond it TPOT dominates."""
    _refuse_negative("seconds", ttft_s=ttft_s)
    return _rate(ttft_s, tpot_s)


def _refuse_negative(unit, **amounts):
    for name, value in amounts.items():
        if not _everywhere(value >= 0):
            raise InputError(f"{name} is {value}, expected 0 or more {unit}")


def _everywhere(condition):
    """Whether a comparison holds, for every element if it was one of arrays."""
    return condition if isinstance(condition, bool) else bool(np.all(condition))
