"""The operations a decoder layer is made of, each with its cost.

Every function here computes its result with NumPy and, if a ledger is active,
records what that cost.  `npinfer.model` does its arithmetic through these
functions only (with those of `npinfer.products`, `npinfer.attention`,
`npinfer.activations` and `npinfer.experts`), so a ledger is complete by
construction.

Read `cost` in npinfer.ledger (what is counted), then npinfer.operation (how a
rule is attached to a body), then the operations in the order a layer applies
them.

Conventions
    shapes     N = B*T new positions; S keys that a query sees at most, T of
               them new.  Activations are (N, d), heads (B, H, T, head_dim).
    FLOPs      (m, k) @ (k, n) is 2*m*k*n; each other + - * / max exp sqrt tanh is 1.
    bytes      stored size of each operand, once per call.  A view moves
               nothing; a broadcast operand counts its stored elements.
    attention  every (query, key) pair of the T x S rectangle; the share the
               causal mask or the window throws away is also masked_flops.
"""

from functools import lru_cache

import numpy as np

from npinfer.errors import ShapeError
from npinfer.formats import spread
from npinfer.ledger import Counts, cost, record
from npinfer.operation import operation
from npinfer.products import values_of
from npinfer.specs import Array, spec


def _embed_rule(tokens, table, positions, scale=None):
    batch, n_new = tokens.shape
    rows = spec((batch * n_new, table.shape[1]), table.format, "weight")  # not the table: the rows it is asked for
    out = spec(rows.shape, tokens.format)
    n_elements = rows.shape[0] * rows.shape[1]
    reads, flops = [rows], n_elements * (table.scaled + (scale is not None))
    if positions is not None:
        reads, flops = [rows, positions], flops + n_elements
    return out, (("embed", cost(reads=reads, writes=[out], elementwise_flops=flops)),)


@operation(_embed_rule)
def embed(tokens, table, positions, *, scale=None):
    """Look up the embedding row of each token: (B, T) ids -> (N, d_model).

    Parameters
    ----------
    tokens : Array (B, T)
    table : Array (vocab_size, d_model)
    positions : Array (T, d_model) or NOTHING
        Learned embeddings of the positions, added in every sequence.
    scale : float, optional
        Multiplies the rows.

    Notes
    -----
    The one weight of which a forward does not read everything: N rows.
    """
    ids = tokens.ravel()
    out = values_of(table, ids)
    if table.scales is not None:
        out *= spread(table.scales[ids], out.shape[-1], table.format)
    if scale is not None:
        out *= scale
    if positions is not None:
        by_sequence = out.reshape(*tokens.shape, -1)
        by_sequence += positions
    return out


def _rms_norm_rule(gain, x, eps):
    if x.shape[-1:] != gain.shape:
        raise ShapeError(f"{gain.name}: x has rows of {x.shape[-1]} but the gain is {gain.shape}")
    n, d = x.shape
    # square d, sum d - 1, mean 1, eps 1, root 1, divide d, gain d
    return x, ((gain.name, cost(reads=[x, gain], writes=[x], elementwise_flops=n * (4 * d + 2))),)


@operation(_rms_norm_rule)
def rms_norm(gain, x, *, eps):
    """Divide each row by its root mean square, then multiply by the gain: (N, d) -> (N, d).

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
    """
    out = x / np.sqrt(np.vecdot(x, x, keepdims=True) / x.shape[-1] + eps)
    out *= gain
    return out


def _layer_norm_rule(gain, bias, x, eps):
    if x.shape[-1:] != gain.shape or gain.shape != bias.shape:
        raise ShapeError(f"{gain.name}: x has rows of {x.shape[-1]} but the gain is {gain.shape} and the bias {bias.shape}")
    n, d = x.shape
    # sum d - 1, mean 1, subtract d, square d, sum d - 1, mean 1, eps 1, root 1, divide d, gain d, bias d
    return x, ((gain.name, cost(reads=[x, gain, bias], writes=[x], elementwise_flops=n * (7 * d + 2))),)


@operation(_layer_norm_rule)
def layer_norm(gain, bias, x, *, eps):
    """Subtract each row's mean, divide by its standard deviation, multiply by the gain, add the bias: (N, d) -> (N, d).

    Source: Ba et al. 2016, "Layer Normalization", arXiv:1607.06450, eq. 4.
    """
    d = np.float32(x.shape[-1])
    out = x - np.add.reduce(x, axis=-1, keepdims=True) / d
    variance = np.add.reduce(out * out, axis=-1, keepdims=True) / d
    out /= np.sqrt(variance + eps)
    out *= gain
    out += bias
    return out


def _rope_rule(rows, rotation, head_dim, turned, others=(), n_kept=0):
    (n, width), (_, n_new, _, _, half) = rows.shape, rotation.shape
    n_heads = sum(turned) + sum(others)
    if n % n_new or width != n_heads * head_dim or 2 * half > head_dim - n_kept:
        raise ShapeError(
            f"rope: rows are {rows.shape} but the rotation is {rotation.shape}, expected a multiple of {n_new} rows of "
            f"{n_heads} heads of {head_dim}, and up to {(head_dim - n_kept) // 2} pairs"
        )
    batch = n // n_new
    outs = [spec((batch, n_heads, n_new, head_dim), rows.format) for n_heads in (*turned, *others)]
    costs = []
    for n_heads in turned if half else ():
        moved = spec((batch, n_heads, n_new, head_dim - n_kept), rows.format)
        costs.append(("rope", cost(reads=[moved], writes=[moved], elementwise_flops=3 * n * n_heads * 2 * half)))
    return (outs[0] if len(outs) == 1 else tuple(outs)), tuple(costs)


@operation(_rope_rule)
def rope(rows, rotation, *, head_dim, turned, others=(), n_kept=0):
    """See rows as heads, and rotate each pair (i, i + half) of a head by the angle of its position.

    Parameters
    ----------
    rows : Array (N, n_heads * head_dim)
        Of queries, or keys, or of both and values behind them.
    rotation : Array (2, T, 1, 2, half)
        Cosines and sines from `npinfer.rope`, as the first and the second
        element of a pair are multiplied with.  A model without rotary
        positions has half 0: nothing is turned or counted.
    head_dim : int
    turned : tuple of int
        Heads of each result that is rotated, and counted by itself.
    others : tuple of int
        Heads of each result behind them that is not.
    n_kept : int
        Leading elements of a head that have no position and are not counted;
        what is behind the 2 * half rotated ones is only copied.

    Returns
    -------
    Array (B, n_heads, T, head_dim), or a list of them

    Notes
    -----
    Half-split pairs, as published Llama checkpoints are laid out.
    Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34.
    """
    cos, sin = rotation
    rows = rows.reshape(-1, len(cos), sum(turned) + sum(others), head_dim)
    heads = rows
    if cos.shape[-1]:
        heads = _rotated(rows[:, :, : sum(turned)] if others else rows, cos, sin, n_kept)
    parts, stop = [], 0
    for n_heads in turned + others:
        start, stop = stop, stop + n_heads
        source = heads if len(parts) < len(turned) else rows
        parts.append(source[:, :, start:stop].transpose(0, 2, 1, 3))
    return parts if len(parts) > 1 else parts[0]


def _rotated(heads, cos, sin, n_kept):
    """Heads (B, T, n_heads, head_dim) with the pairs behind the first n_kept elements turned.

    Cosines and sines are (T, 1, 2, half), sines with the sign that each element takes them with.
    """
    half = cos.shape[-1]
    stop = n_kept + 2 * half
    whole = heads.shape[-1] == 2 * half
    moved = heads if whole else heads[..., n_kept:stop]
    pairs = moved.reshape(*heads.shape[:-1], 2, half)
    out = pairs * cos
    out += pairs[..., ::-1, :] * sin
    out = out.reshape(moved.shape)
    return out if whole else np.concatenate((heads[..., :n_kept], out, heads[..., stop:]), axis=-1)


@lru_cache(maxsize=2**14)
def _kv_append_rule(k, v, n_visible, format_, latent):
    batch, n_heads, n_new, width = k.shape
    if latent:  # one row, the two behind each other
        width += v.shape[3]
        new = [spec((batch, n_heads, n_new, width), format_, "kv")]
    else:
        new = [spec(x.shape, format_, "kv") for x in (k, v)]
    visible = spec((batch, n_heads, n_visible, width), format_, "kv")
    return visible, (("kv_append", cost(reads=[k, v], writes=new)),)


def kv_append(cache, layers, k, v):
    """Append the new rows to the cache, and return all that the new queries may see.

    Parameters
    ----------
    cache : KVCache
    layers : range
        The layer, or the equal neighbours that a shape-only entry stands for.
    k, v : Array (B, n_kv_heads, T, head_dim)
        Keys after rotation (a position never changes once it is written) and
        values; or the two pieces (B, 1, T, ...) of a latent row.

    Returns
    -------
    list of Array (B, n_kv_heads, S, head_dim)
        Keys and values, or the latent rows alone: views of the cache, an int8
        one's with the scale of each row as one more column.
    """
    if k.data is None:
        n_visible = cache.n_visible(layers[0]) + k.shape[2]
        parts = cache.append(layers, k, v)
    else:
        parts = cache.append(layers, k.data, v.data)
        n_visible = parts[0].shape[2]
    visible, costs = _kv_append_rule(k.spec, v.spec, n_visible, cache.format, len(parts) == 1)
    record(costs)  # after what may be refused
    return [Array(visible, part) for part in parts]


def cache_load(cache, parts, length):
    """Copy rows that were computed before into an empty cache: `KVCache.restore`, recorded.

    Counts the stored bytes of the rows that the cache then holds, read once
    and written once.
    """
    cache.restore(parts, length)
    record((("cache_load", Counts(kv_bytes_read=cache.nbytes, kv_bytes_written=cache.nbytes)),))


def _residual_rule(op):
    def rule(x, y):
        if x.shape != y.shape:
            raise ShapeError(f"{op}: {x.shape} and {y.shape} differ")
        return x, ((op, cost(reads=[x, y], writes=[x], elementwise_flops=x.shape[0] * x.shape[1])),)

    return rule


@operation(_residual_rule("attn_residual"))
def attn_residual(x, y):
    """Add what attention computed to what came in: (N, d) + (N, d)."""
    return x + y


@operation(_residual_rule("mlp_residual"))
def mlp_residual(x, y):
    """Add what the MLP computed to what came in: (N, d) + (N, d)."""
    return x + y


def _sample_rule(logits):
    batch, vocab_size = logits.shape
    out = spec((batch,), None, "token")
    return out, (("sample", cost(reads=[logits], elementwise_flops=batch * (vocab_size - 1))),)


@operation(_sample_rule)
def sample(logits):
    """The token of the largest logit in each row: (B, vocab_size) -> (B,) ids."""
    return logits.argmax(axis=-1)
