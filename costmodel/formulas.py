"""Closed forms: counts and times of inference, each a plain function.

Read in three parts: what a model weighs (parameters, bytes), what running it
costs (`forward_counts`, `decode_counts_total`), and the textbook's formulas
for time.  Numeric arguments may be NumPy arrays, which broadcast; counts of
whole numbers are Python ints, and arrays whose counts would pass 2**63 raise
OverflowError instead of wrapping.
"""

from itertools import pairwise
from math import prod

import numpy as np

from costmodel import loads, operations
from costmodel.arguments import least, most, refuse_overflow, whole_numbers
from costmodel.storage import kv_token_bytes
from costmodel.tensors import tensors
from npinfer.errors import InputError
from npinfer.ledger import Counts

# --- what a model weighs ---------------------------------------------------


def n_parameters(config):
    """Parameters of the model, a tied head once, all experts.

    >>> n_parameters(npinfer.preset("mistral-7b"))
    7241732096
    """
    return sum([tensor.n_parameters for tensor in tensors(config).values()])


def n_active_parameters(config):
    """Parameters of the model with the k experts of one token in place of all, embedding and head included."""
    idle = [_idle_copies(config, each) * (each.n_parameters // each.n_copies) for each in tensors(config).values()]
    return n_parameters(config) - sum(idle)


def n_streamed_parameters(config):
    """Parameters that decode steps read: all, less the tables of which a step reads the rows of its tokens.

    Those are the input embedding, where the head has its own matrix, and learned positions.  All experts are in it.

    >>> n_streamed_parameters(npinfer.preset("mistral-7b"))      # the 7.111e9 of the textbook's example
    7110660096
    """
    return n_parameters(config) - sum([table.n_parameters for table in _looked_up(config)])


def weight_bytes(config, precision, streamed=False):
    """Stored bytes of the weights.

    Parameters
    ----------
    streamed : bool
        Those that a decode step of one sequence reads, the rows of its token in
        the embedding and in a table of positions left out: of a layer's E
        experts k.  Otherwise those that occupy memory.
    """
    every, tables = tensors(config).values(), _looked_up(config)
    if not streamed:
        return sum([each.n_copies * each.total_bytes(precision) for each in every])
    used = [(each.n_copies - _idle_copies(config, each), each) for each in every if each not in tables]
    return sum([n_copies * each.total_bytes(precision) for n_copies, each in used])


def _looked_up(config):
    """Tables of which a forward reads rows, not everything."""
    names = ["positions"] if config.tie_embeddings else ["embed", "positions"]
    return [tensors(config)[name] for name in names if name in tensors(config)]


def _idle_copies(config, tensor):
    """Copies of a tensor, one for each expert, that a token does not use."""
    return tensor.n_copies - config.experts.n_active if tensor.n_copies > 1 else 0


def kv_elements_per_token(config):
    """Elements that one token adds to the KV cache: a key and a value in every layer, or one latent row.

    n_kv_heads, not n_heads: grouped queries share their keys and values.
    Source: Ainslie et al. 2023, "GQA", arXiv:2305.13245, section 2.2; latent:
    DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.

    >>> kv_elements_per_token(npinfer.preset("mistral-7b"))      # 32 * (8 * 128 + 8 * 128)
    65536
    """
    return config.n_layers * prod(config.kv_shape)


def kv_bytes_per_token(config, precision):
    """Bytes that one token adds to the KV cache, an int8 cache's scales included.

    >>> kv_bytes_per_token(npinfer.preset("llama-2-7b"), npinfer.Precision())      # 2 * 32 layers * 32 heads * 128 * 2 B
    524288
    """
    return config.n_layers * kv_token_bytes(config, precision)


@refuse_overflow
def kv_bytes_read(config, precision, n_context, batch=1):
    """KV bytes that a decode step reads when its token sees `n_context` positions, itself included.

    A layer with a window reads at most the window.
    """
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window)


@refuse_overflow
def kv_bytes_held(config, precision, n_context, batch=1):
    """KV bytes in memory after `n_context` positions: a layer with a window keeps the window - 1 last."""
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window - 1)


def _kv_bytes(config, precision, batch, n_context, limit):
    batch = whole_numbers("batch", batch, 1)
    rows = sum(
        len(layers) * (n_context if window is None else least(n_context, limit(window)))
        for window, layers in loads.layers_by_window(config)
    )
    return batch * rows * kv_token_bytes(config, precision)


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
    x, y = np.asarray(n_output, dtype=np.float64), np.asarray(latency_s, dtype=np.float64)
    if x.shape != y.shape or len(set(x.ravel().tolist())) < 2:
        raise InputError(f"a line through {x.size} points needs two different n_output at least, and a latency for each")
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
