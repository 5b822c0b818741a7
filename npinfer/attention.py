"""Attention: scores, softmax and mix, and the expansion of latent rows that some models do before it.

Conventions are those of `npinfer.ops`; `attention` is the function to read.
"""

from functools import lru_cache

import numpy as np

from npinfer.errors import ShapeError
from npinfer.ledger import cost
from npinfer.operation import operation
from npinfer.products import capped, product, projection_flops
from npinfer.specs import spec

BLOCK_ELEMENTS = 2**19  # scores held at once: 2 MiB, which a cache holds from one pass over them to the next
BLOCK_ROWS = 128  # queries of a block: keys behind the last of them are skipped


def visible_pairs(n_new, n_keys, window):
    """(query, key) pairs that are kept of n_new x n_keys: query i sees the first n_keys - n_new + i + 1
    keys, at most the `window` last of them."""
    if window is None:
        return n_new * (n_keys - n_new) + n_new * (n_new + 1) // 2
    growing = min(n_new, max(0, window - (n_keys - n_new)))  # queries whose window is not yet full
    return growing * (n_keys - n_new) + growing * (growing + 1) // 2 + (n_new - growing) * window


def _attention_rule(q, k, v, sinks, scale, window, softcap=None):
    batch, n_heads, n_new, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    if k.shape[:3] != v.shape[:3] or n_heads % n_kv_heads or k.shape[-1] != head_dim:
        raise ShapeError(f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit each other")
    scores = spec((batch, n_heads, n_new, n_keys), q.format, "score")
    out = spec((batch * n_new, n_heads * v.shape[3]), q.format)
    n_rows = batch * n_heads * n_new
    n_scores = n_rows * n_keys
    masked = 2 * batch * n_heads * (n_new * n_keys - visible_pairs(n_new, n_keys, window))
    widening = n_scores if k.scaled else 0  # scales of K multiply scores, those of V probabilities
    capping = 0 if softcap is None else 3 * n_scores
    # A sink is one more element of every row of the softmax.
    rows = scores if sinks is None else spec((batch, n_heads, n_new, n_keys + 1), q.format, "score")
    row_flops = 5 * rows.shape[-1] - 2  # max n - 1, subtract n, exp n, sum n - 1, divide n
    return out, (
        (
            "attn_scores",
            cost(
                [q, k],
                [scores],
                matmul_flops=2 * n_scores * head_dim,
                masked_flops=masked * head_dim,
                elementwise_flops=n_scores + widening + capping,
            ),
        ),
        ("softmax", cost([rows] if sinks is None else [rows, sinks], [rows], elementwise_flops=n_rows * row_flops)),
        (
            "attn_mix",
            cost(
                [scores, v],
                [out],
                matmul_flops=2 * n_scores * v.shape[3],
                masked_flops=masked * v.shape[3],
                elementwise_flops=widening,
            ),
        ),
    )


@operation(_attention_rule)
def attention(q, k, v, sinks, *, scale, window, softcap=None):
    """softmax(q k^T * scale) v under the causal mask: scores, softmax and mix, counted one by one.

    Parameters
    ----------
    q : Array (B, n_heads, T, head_dim)
    k : Array (B, n_kv_heads, S, head_dim)
    v : Array (B, n_kv_heads, S, value_dim)
        The last T rows belong to the queries.
    sinks : Array (n_heads,) or NOTHING
        One more score in every row of a head, which takes its share of the
        softmax and has no value.
    scale : float
    window : int or None
    softcap : float, optional
        Scores become softcap * tanh(scores / softcap).

    Returns
    -------
    Array (N, n_heads * value_dim)

    Notes
    -----
    Query head h reads KV head h // (n_heads / n_kv_heads).  K and V are not
    repeated: the heads of a group share the read.  Scores are worked in blocks
    of sequences, KV heads and queries, so that they need bounded memory; keys that
    no query of a block sees are skipped, while the count stays the whole rectangle.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; groups: Ainslie et al. 2023, arXiv:2305.13245,
    section 2.2; sinks: Xiao et al. 2023, arXiv:2309.17453, section 3.
    """
    batch, n_heads, n_new, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    k_scales = v_scales = None
    if k.shape[-1] > head_dim:  # an int8 cache: the scale of each row is one more column
        k_scales, v_scales = k[:, :, None, :, -1], v[:, :, None, :, -1]
        k, v = k[..., :-1], v[..., :-1]
    group, value_dim = n_heads // n_kv_heads, v.shape[-1]
    if sinks is not None:
        sinks = sinks.reshape(n_kv_heads, group, 1)
    if n_new == 1:  # the heads of a group become the rows of one product, and nothing is hidden from them
        q = q.reshape(batch, n_kv_heads, group, head_dim)
        weights = _weights(q, k, scale, softcap, sinks, k_scales, v_scales)
        return (weights @ v).reshape(batch, n_heads * value_dim)

    k, v = k[:, :, None], v[:, :, None]
    k_scales, v_scales, sinks = [each if each is None else each[..., None, :] for each in (k_scales, v_scales, sinks)]
    out = np.empty((batch, n_new, n_heads, value_dim), q.dtype)
    q = q.reshape(batch, n_kv_heads, group, n_new, head_dim)
    mixed = out.swapaxes(1, 2).reshape(batch, n_kv_heads, group, n_new, value_dim)
    n_past = n_keys - n_new
    for *of, rows in _blocks(batch, n_kv_heads, group, n_new, n_keys):
        of, first = tuple(of), n_past + rows.start
        seen = slice(0 if window is None else max(0, first + 1 - window), n_past + rows.stop)
        # The mask's first key: without a window, every query of a block sees what comes before the block.
        start = first if window is None else seen.start
        mask = hidden(first - start, seen.stop - start, window)
        scales = [each if each is None else each[of][..., seen] for each in (k_scales, v_scales)]
        of_heads = None if sinks is None else sinks[of[1]]
        weights = _weights(q[of][..., rows, :], k[of][..., seen, :], scale, softcap, of_heads, *scales, mask)
        np.matmul(weights, v[of][..., seen, :], out=mixed[of][..., rows, :])
    return out.reshape(batch * n_new, n_heads * value_dim)


def _blocks(batch, n_kv_heads, group, n_new, n_keys):
    """Slices of sequences, KV heads and queries whose scores are few enough; all keys are worked at once."""
    n_rows = max(1, min(n_new, BLOCK_ROWS, BLOCK_ELEMENTS // (group * n_keys)))
    n_heads = max(1, min(n_kv_heads, BLOCK_ELEMENTS // (group * n_rows * n_keys)))
    n_sequences = max(1, BLOCK_ELEMENTS // (n_kv_heads * group * n_rows * n_keys))
    for sequence in range(0, batch, n_sequences):
        for head in range(0, n_kv_heads, n_heads):
            for row in range(0, n_new, n_rows):
                rows = slice(row, min(row + n_rows, n_new))
                yield slice(sequence, sequence + n_sequences), slice(head, head + n_heads), rows


def _weights(q, k, scale, softcap, sinks, k_scales, v_scales, mask=None):
    """What each query takes of each value: scores of q (..., rows, head_dim) and k (..., keys, head_dim), their softmax."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= scale
    if k_scales is not None:
        scores *= k_scales
    if softcap is not None:
        capped(scores, softcap)
    if mask is not None:
        np.copyto(scores[..., -mask.shape[1] :], -np.inf, where=mask)
    weights = softmax(scores) if sinks is None else softmax_with(sinks, scores)
    if v_scales is not None:
        weights *= v_scales
    return weights


@lru_cache(maxsize=4)
def hidden(first_query, n_keys, window):
    """True where a key is not seen: queries at positions first_query to n_keys - 1, keys at 0 to n_keys - 1."""
    distance = np.arange(first_query, n_keys)[:, None] - np.arange(n_keys)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def softmax(scores):
    """Softmax over the last axis, in place."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores


def softmax_with(sinks, scores):
    """What is left for `scores` in a softmax over the last axis that has the sink of their head as one more element."""
    column = np.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return softmax(np.concatenate((scores, column), axis=-1))[..., :-1]


def attend_of(config, window):
    """`attention` with the settings of a layer."""
    scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
    return attention.fixed(scale=scale, window=window, softcap=config.attn_softcap)


def _kv_expand_rule(rows, w, n_heads, rope_dim, value_dim, format_):
    batch, _, n_keys, width = rows.shape
    ((matrix, bias),) = w
    d_out, rank = matrix.shape
    if rank + rope_dim != width or d_out % n_heads:
        raise ShapeError(f"kv_expand: rows are {rows.shape} but w is {matrix.shape} for {n_heads} heads and {rope_dim} rotated")
    keys = spec((batch, n_heads, n_keys, d_out // n_heads - value_dim + rope_dim), format_)
    values = spec((batch, n_heads, n_keys, value_dim), format_)
    flops = projection_flops(batch * n_keys, matrix, bias)
    if rows.scaled:
        flops["elementwise_flops"] += batch * n_keys * width
    return (keys, values), (("kv_expand", cost([rows, matrix], [keys, values], **flops)),)


@operation(_kv_expand_rule)
def kv_expand(rows, w, *, n_heads, rope_dim, value_dim, format_):
    """Keys and values of all heads from the latent rows of the cache.

    Parameters
    ----------
    rows : Array (B, 1, S, kv_rank + rope_dim)
        The latent, and behind it the rotated part of the keys, one for all heads.
    w : Array of weights (n_heads * (nope_dim + value_dim), kv_rank)
    n_heads, rope_dim, value_dim : int
    format_ : Format
        Of the results, which are activations.

    Returns
    -------
    keys : Array (B, n_heads, S, nope_dim + rope_dim)
    values : Array (B, n_heads, S, value_dim)

    Notes
    -----
    It runs for all S positions in every forward: that the cache holds the
    latent only is paid for here.
    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, eq. 9 to 17.
    """
    batch, _, n_keys, width = rows.shape
    rank, nope = w.rows.shape[1], len(w.rows) // n_heads - value_dim
    if width > rank + rope_dim:  # an int8 cache: codes, and the scale of each row as one more column
        rows = rows[..., :-1] * rows[..., -1:]
    latent, rotated = rows[..., :rank], rows[..., rank:]
    expanded = product(latent.reshape(batch * n_keys, rank), w)
    expanded = expanded.reshape(batch, n_keys, n_heads, nope + value_dim).transpose(0, 2, 1, 3)
    keys = np.empty((batch, n_heads, n_keys, nope + rope_dim), expanded.dtype)
    keys[..., :nope] = expanded[..., :nope]
    keys[..., nope:] = rotated
    return keys, expanded[..., nope:]
