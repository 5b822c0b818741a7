"""Closed forms: counts and times of inference, each a plain function.

Read in three parts: what a model weighs (parameters, bytes), what running it
costs (`forward_counts`, `decode_counts_total`), and the textbook's formulas
for time.  Numeric arguments may be NumPy arrays, which broadcast; counts of
whole numbers are Python ints, and arrays whose counts would pass 2**63 raise
OverflowError instead of wrapping.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from costmodel import loads, operations
from costmodel.loads import whole_numbers
from npinfer.errors import InputError
from npinfer.ledger import Counts

# --- what a model weighs ---------------------------------------------------


def n_parameters(config):
    """Parameters of the model, a tied head once.

    >>> n_parameters(npinfer.preset("mistral-7b"))
    7241732096
    """
    heads = 1 if config.tie_embeddings else 2
    return sum(_matrix_sizes(config)) + sum(_vector_sizes(config)) + heads * config.vocab_size * config.d_model


def n_streamed_parameters(config):
    """Parameters that every decode step reads: all, less the input embedding where the head has its own matrix.

    >>> n_streamed_parameters(npinfer.preset("mistral-7b"))      # the 7.111e9 of the textbook's example
    7110660096
    """
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return n_parameters(config) - embedding


def weight_bytes(config, precision, streamed=False):
    """Stored bytes of the weights.

    Parameters
    ----------
    streamed : bool
        Those that a decode step reads, the embedding rows of its tokens left
        out; otherwise those that occupy memory.
    """
    table = operations.stored_matrix_bytes(precision, config.vocab_size, config.d_model)
    n_tables = 1 if streamed or config.tie_embeddings else 2
    matrices = [operations.stored_matrix_bytes(precision, d_out, d_in) for d_out, d_in in _matrix_shapes(config)]
    vectors = [operations.stored_vector_bytes(precision, size) for size in _vector_sizes(config)]
    return config.n_layers * sum(matrices) + sum(vectors) + n_tables * table


def _matrix_shapes(config):
    """(d_out, d_in) of the projections of one layer."""
    d, d_ff = config.d_model, config.d_ff
    d_q, d_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return [(d_q, d), (d_kv, d), (d_kv, d), (d, d_q), (d_ff, d), (d_ff, d), (d, d_ff)]


def _matrix_sizes(config):
    return [config.n_layers * d_out * d_in for d_out, d_in in _matrix_shapes(config)]


def _vector_sizes(config):
    """Sizes of all gains and biases of the model, those of one kind together."""
    d, d_ff = config.d_model, config.d_ff
    d_q, d_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = [d, d]
    layer += [d_q, d_kv, d_kv] if config.qkv_bias else []
    layer += [d] if config.o_bias else []
    layer += [d_ff, d_ff, d] if config.mlp_bias else []
    return [config.n_layers * size for size in layer] + [d]


def kv_elements_per_token(config):
    """Elements that one token adds to the KV cache: a key and a value in every layer.

    n_kv_heads, not n_heads: grouped queries share their keys and values.
    Source: Ainslie et al. 2023, "GQA", arXiv:2305.13245, section 2.2.

    >>> kv_elements_per_token(npinfer.preset("mistral-7b"))      # 32 * (8 * 128 + 8 * 128)
    65536
    """
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim


def kv_bytes_per_token(config, precision):
    """Bytes that one token adds to the KV cache, an int8 cache's scales included.

    >>> kv_bytes_per_token(npinfer.preset("llama-2-7b"), npinfer.Precision())      # 2 * 32 layers * 32 heads * 128 * 2 B
    524288
    """
    return 2 * config.n_layers * operations.kv_row_bytes(config, precision)


@loads.refuse_overflow
def kv_bytes_read(config, precision, n_context, batch=1):
    """KV bytes that a decode step reads when its token sees `n_context` positions, itself included.

    A layer with a window reads at most the window.
    """
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window)


@loads.refuse_overflow
def kv_bytes_held(config, precision, n_context, batch=1):
    """KV bytes in memory after `n_context` positions: a layer with a window keeps the window - 1 last."""
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window - 1)


def _kv_bytes(config, precision, batch, n_context, limit):
    batch = whole_numbers("batch", batch, 1)
    rows = sum(
        n_layers * (n_context if window is None else loads.least(n_context, limit(window)))
        for window, n_layers in loads.layers_by_window(config)
    )
    return 2 * batch * rows * operations.kv_row_bytes(config, precision)


# --- what running it costs -------------------------------------------------


@loads.refuse_overflow
def forward_counts(config, precision, batch, n_cached, n_new, all_logits=False):
    """The ten counts of one forward over `n_new` tokens of each sequence, on top of `n_cached`.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    batch, n_cached, n_new : int or integer array
    all_logits : bool
        Whether the head runs at every position instead of the last one.

    Returns
    -------
    npinfer.Counts
        Of ints, or of int64 arrays of the broadcast shape.  Sampling is not
        in it, see `sample_counts`.

    Raises
    ------
    InputError
        If a number is not whole, `n_cached` negative or another below 1.
    OverflowError
        If arrays would give a count of 2**63 or more.
    """
    return _counts(
        config,
        precision,
        partial(loads.forward_load, all_logits=all_logits),
        batch=whole_numbers("batch", batch, 1),
        n_cached=whole_numbers("n_cached", n_cached, 0),
        n_new=whole_numbers("n_new", n_new, 1),
    )


@loads.refuse_overflow
def decode_counts_total(config, precision, batch, n_prompt, n_output):
    """The ten counts of a whole decode: n_output - 1 steps, the i-th on a context of n_prompt + i.

    The first output token is the prefill's.  No loop over tokens: see
    `costmodel.loads`.  Parameters, results and errors as `forward_counts`;
    sampling is left out.
    """
    return _counts(
        config,
        precision,
        loads.decode_load,
        batch=whole_numbers("batch", batch, 1),
        n_prompt=whole_numbers("n_prompt", n_prompt, 1),
        n_steps=whole_numbers("n_output", n_output, 1) - 1,
    )


@loads.refuse_overflow
def sample_counts(config, precision, batch):
    """Counts of greedy sampling after one forward: vocab_size - 1 comparisons in each sequence."""
    counts = operations.sample_counts(config, precision, whole_numbers("batch", batch, 1))
    return counts if np.ndim(batch) == 0 else Counts(*np.broadcast_arrays(*counts))


def _counts(config, precision, load_of, **numbers):
    row_bytes = partial(operations.stored_rows_bytes, precision, config.d_model)
    return operations.total_counts(config, precision, load_of(config, row_bytes, **numbers))


# --- the textbook's formulas -----------------------------------------------


@loads.refuse_overflow
def prefill_flops_rough(batch, n_prompt, n_params):
    """2*B*L*P: two FLOPs for each parameter and prompt token; leaves out attention's T x S products."""
    _refuse_negative("of them", batch=batch, n_prompt=n_prompt, n_params=n_params)
    return 2 * batch * n_prompt * n_params


@loads.refuse_overflow
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
    return loads.most(_rate(flops, flops_per_s), _rate(bytes_moved, memory_bytes_per_s))


def tpot_floor_s(bytes_moved, memory_bytes_per_s, flops=0, flops_per_s=float("inf")):
    """Seconds below which no decode step ends: its bytes at the bandwidth, or its FLOPs at the peak.

    >>> round(tpot_floor_s(14.2e9, 1008e9), 4)
    0.0141
    """
    return loads.most(_rate(bytes_moved, memory_bytes_per_s), _rate(flops, flops_per_s))


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
