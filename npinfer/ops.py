"""The operations a decoder layer is made of, each with its cost.

Every function here computes its result with NumPy and, if a ledger is active,
records what that cost.  `npinfer.model` does its arithmetic through these
functions only, so a ledger is complete by construction.

Read `cost` in npinfer.ledger (what is counted), then `operation` (how a rule is
attached to a body), then the operations in the order a layer applies them.

Conventions
    shapes     N = B*T new positions; S keys that a query sees at most, T of
               them new.  Activations are (N, d), heads (B, H, T, head_dim).
    FLOPs      (m, k) @ (k, n) is 2*m*k*n; each other + - * / max exp sqrt is 1.
    bytes      stored size of each operand, once per call.  A view moves
               nothing; a broadcast operand counts its stored elements.
    attention  every (query, key) pair of the T x S rectangle; the share the
               causal mask or the window throws away is also masked_flops.
"""

from functools import lru_cache, wraps

import numpy as np

from npinfer.errors import ShapeError
from npinfer.formats import spread
from npinfer.ledger import Counts, cost, record
from npinfer.specs import Array, Spec, spec

BLOCK_ELEMENTS = 2**21  # scores held at once: 8 MiB, however long the prompt
TILE_ELEMENTS = 2**18  # weights widened at once: 1 MiB, which a cache holds until they are multiplied


def operation(rule):
    """Attach a pure rule to the NumPy body it describes.

    The rule maps the operands' specs (and the static keyword parameters) to
    the spec, or specs, of the result and to ((op, Counts), ...).  It is asked
    once for each combination and remembered.  The body gets the operands'
    data, and is not run where there is none.
    """
    rule = lru_cache(maxsize=2**14)(rule)

    def attach(body):
        @wraps(body)
        def call(*operands, **static):
            out, costs = rule(*[x.spec for x in operands], **static)
            record(costs)
            if operands[0].data is None:
                return Array(out) if out.__class__ is Spec else [Array(part) for part in out]
            result = body(*[x.data for x in operands], **static)
            return Array(out, result) if out.__class__ is Spec else list(map(Array, out, result))

        call.rule = rule
        return call

    return attach


def _embed_rule(tokens, table):
    batch, n_new = tokens.shape
    rows = spec((batch * n_new, table.shape[1]), table.format, "weight")  # not the table: the rows it is asked for
    out = spec(rows.shape, tokens.format)
    widening = rows.shape[0] * rows.shape[1] if table.scaled else 0
    return out, (("embed", cost(reads=[rows], writes=[out], elementwise_flops=widening)),)


@operation(_embed_rule)
def embed(tokens, table):
    """Look up the embedding row of each token: (B, T) ids -> (N, d_model).

    Notes
    -----
    The one weight of which a forward does not read everything: N rows.
    """
    ids = tokens.ravel()
    return table.rows[ids] if table.scales is None else widened(table, ids)


def widened(matrix, rows):
    """Some rows of a matrix that has scales, each element multiplied by its own."""
    codes = matrix.rows[rows]
    return codes * spread(matrix.scales[rows], codes.shape[-1], matrix.format)


def _rms_norm_rule(x, gain, eps):
    if x.shape[-1:] != gain.shape:
        raise ShapeError(f"{gain.name}: x has rows of {x.shape[-1]} but the gain is {gain.shape}")
    n, d = x.shape
    # square d, sum d - 1, mean 1, eps 1, root 1, divide d, gain d
    return x, ((gain.name, cost(reads=[x, gain], writes=[x], elementwise_flops=n * (4 * d + 2))),)


@operation(_rms_norm_rule)
def rms_norm(x, gain, *, eps):
    """Divide each row by its root mean square, then multiply by the gain: (N, d) -> (N, d).

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
    """
    mean_square = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    out = x / np.sqrt(mean_square + eps)
    out *= gain
    return out


def _linear_rule(x, parts):
    n, d_in = x.shape
    outs, costs = [], []
    for matrix, bias in parts:
        d_out, w_d_in = matrix.shape
        if w_d_in != d_in:
            raise ShapeError(f"{matrix.name}: x has d_in={d_in} but w has d_in={w_d_in} (x {x.shape}, w {matrix.shape})")
        out = spec((n, d_out), x.format)
        # Scales of a row (int8) multiply the product, scales of a group (int4) the weights.
        flops = 0 if not matrix.scaled else n * d_out if matrix.format.group == 0 else d_in * d_out
        if bias is not None:
            flops += n * d_out
        counts = cost(
            reads=[x, matrix] if bias is None else [x, matrix, bias],
            writes=[out],
            matmul_flops=2 * n * d_in * d_out,
            elementwise_flops=flops,
        )
        outs.append(out)
        costs.append((matrix.name, counts))
    return (outs[0] if len(outs) == 1 else tuple(outs)), tuple(costs)


@operation(_linear_rule)
def linear(x, w):
    """Multiply activations by one weight matrix, or by several that share the input.

    Parameters
    ----------
    x : Array (N, d_in)
    w : Array of joined weights
        Spec: a (matrix, bias or None) pair of specs for each projection,
        matrices (d_out, d_in).  Data: a `npinfer.weights.Matrix` whose rows
        are those of all the projections.

    Returns
    -------
    Array (N, d_out), or a list of them, one for each projection

    Raises
    ------
    ShapeError
        If `x` and `w` disagree on d_in.

    Notes
    -----
    The weight bytes do not depend on N.  That is why decoding one token waits
    on memory while a long prefill waits on arithmetic.  Projections that share
    an input are one product, and still counted one by one.
    """
    if w.format.group:  # scales of groups of inputs: widened in tiles, so that they never are all at once
        out = np.empty((len(x), len(w.rows)), x.dtype)
        n_rows = max(1, TILE_ELEMENTS // x.shape[-1])
        for start in range(0, len(w.rows), n_rows):
            tile = slice(start, start + n_rows)
            out[:, tile] = x @ widened(w, tile).T
    else:
        out = x @ w.rows.T
        if w.scales is not None:
            out *= w.scales[:, 0]
    if w.bias is not None:
        out += w.bias
    return out if len(w.splits) == 1 else [out[:, part] for part in w.splits]


def _rope_rule(x, rotation):
    batch, n_heads, n_new, head_dim = x.shape
    if rotation.shape[:2] != (2, n_new) or 2 * rotation.shape[2] > head_dim:
        raise ShapeError(f"rope: x is {x.shape} but the rotation is {rotation.shape}, expected (2, {n_new}, up to {head_dim // 2})")
    rotated = batch * n_heads * n_new * 2 * rotation.shape[-1]
    return x, (("rope", cost(reads=[x], writes=[x], elementwise_flops=3 * rotated)),)


@operation(_rope_rule)
def rope(x, rotation):
    """Rotate each pair (i, i + half) of a head by the angle of its position.

    Parameters
    ----------
    x : Array (B, H, T, head_dim)
    rotation : Array (2, T, half)
        Cosines and sines from `npinfer.rope`.

    Notes
    -----
    Half-split pairs, as published Llama checkpoints are laid out.
    Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = np.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


@lru_cache(maxsize=2**14)
def _kv_append_rule(k, v, n_kept, format_):
    batch, n_kv_heads, n_new, head_dim = k.shape
    new = spec(k.shape, format_, "kv")
    visible = spec((batch, n_kv_heads, n_kept + n_new, head_dim), format_, "kv")
    return visible, (("kv_append", cost(reads=[k, v], writes=[new, new])),)


def kv_append(cache, layers, k, v):
    """Append the new keys and values to the cache, and return all that the new queries may see.

    Parameters
    ----------
    cache : KVCache
    layers : range
        The layer, or the equal neighbours that a shape-only entry stands for.
    k, v : Array (B, n_kv_heads, T, head_dim)
        Keys after rotation: a position never changes once it is written.

    Returns
    -------
    keys, values : Array (B, n_kv_heads, S, head_dim)
        Views of the cache, an int8 one's with the scale of each row as one more column.
    """
    visible, costs = _kv_append_rule(k.spec, v.spec, cache.n_visible(layers[0]), cache.format)
    numeric = k.data is not None
    keys, values = cache.append(layers, k.data if numeric else k, v.data if numeric else v)
    record(costs)  # after what may be refused
    return Array(visible, keys), Array(visible, values)


def cache_load(cache, parts, length):
    """Copy rows that were computed before into an empty cache: `KVCache.restore`, recorded.

    Counts the stored bytes of the rows that the cache then holds, read once
    and written once.
    """
    cache.restore(parts, length)
    record((("cache_load", Counts(kv_bytes_read=cache.nbytes, kv_bytes_written=cache.nbytes)),))


def visible_pairs(n_new, n_keys, window):
    """(query, key) pairs that are kept of n_new x n_keys: query i sees the first n_keys - n_new + i + 1
    keys, at most the `window` last of them."""
    if window is None:
        return n_new * (n_keys - n_new) + n_new * (n_new + 1) // 2
    growing = min(n_new, max(0, window - (n_keys - n_new)))  # queries whose window is not yet full
    return growing * (n_keys - n_new) + growing * (growing + 1) // 2 + (n_new - growing) * window


def _attention_rule(q, k, v, scale, window):
    batch, n_heads, n_new, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    if k.shape != v.shape or n_heads % n_kv_heads or k.shape[-1] != head_dim:
        raise ShapeError(f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit each other")
    scores = spec((batch, n_heads, n_new, n_keys), q.format, "score")
    out = spec((batch * n_new, n_heads * head_dim), q.format)
    n_scores = batch * n_heads * n_new * n_keys
    flops = 2 * n_scores * head_dim
    masked = 2 * batch * n_heads * head_dim * (n_new * n_keys - visible_pairs(n_new, n_keys, window))
    widening = n_scores if k.scaled else 0  # scales of K multiply scores, those of V probabilities
    return out, (
        ("attn_scores", cost([q, k], [scores], matmul_flops=flops, masked_flops=masked, elementwise_flops=n_scores + widening)),
        # max S - 1, subtract S, exp S, sum S - 1, divide S
        ("softmax", cost([scores], [scores], elementwise_flops=5 * n_scores - 2 * batch * n_heads * n_new)),
        ("attn_mix", cost([scores, v], [out], matmul_flops=flops, masked_flops=masked, elementwise_flops=widening)),
    )


@operation(_attention_rule)
def attention(q, k, v, *, scale, window):
    """softmax(q k^T * scale) v under the causal mask: scores, softmax and mix, counted one by one.

    Parameters
    ----------
    q : Array (B, n_heads, T, head_dim)
    k, v : Array (B, n_kv_heads, S, head_dim)
        The last T rows belong to the queries.
    scale : float
    window : int or None

    Returns
    -------
    Array (N, n_heads * head_dim)

    Notes
    -----
    Query head h reads KV head h // (n_heads / n_kv_heads).  K and V are not
    repeated: the heads of a group share the read.  A long prompt is worked in
    blocks of queries, so that scores need bounded memory; keys that no query of
    a block sees are skipped, while the count stays the whole rectangle.
    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; groups: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    batch, n_heads, n_new, head_dim = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    n_past = n_keys - n_new
    grouped = (batch, n_kv_heads, n_heads // n_kv_heads, n_new, head_dim)
    out = np.empty((batch, n_new, n_heads, head_dim), q.dtype)
    scales = k.shape[-1] > head_dim  # of an int8 cache: one more column
    k_scales, v_scales = k[..., None, None, :, -1], v[..., None, None, :, -1]
    k, v = k[..., :head_dim], v[..., :head_dim]
    q, mixed = q.reshape(grouped), out.swapaxes(1, 2).reshape(grouped)
    if n_new == 1:  # the heads of a group become the rows of one product
        q, mixed = q.swapaxes(2, 3), mixed.swapaxes(2, 3)
    k, v = k[:, :, None], v[:, :, None]
    rows = max(1, BLOCK_ELEMENTS // (batch * n_heads * n_keys))
    for start in range(0, n_new, rows):
        stop = min(start + rows, n_new)
        first = 0 if window is None else max(0, n_past + start + 1 - window)
        last = n_past + stop
        block = slice(None) if n_new == 1 else slice(start, stop)
        scores = q[..., block, :] @ k[..., first:last, :].swapaxes(-1, -2)
        scores *= scale
        if scales:
            scores *= k_scales[..., first:last]
        if n_new > 1:
            np.copyto(scores, -np.inf, where=hidden(n_past + start - first, n_past + stop - first, window))
        softmax(scores)
        if scales:
            scores *= v_scales[..., first:last]
        mixed[..., block, :] = scores @ v[..., first:last, :]
    return out.reshape(batch * n_new, n_heads * head_dim)


@lru_cache(maxsize=4)
def hidden(first_query, n_keys, window):
    """True where a key is not seen: queries at positions first_query to n_keys - 1, keys at 0 to n_keys - 1."""
    distance = np.arange(first_query, n_keys)[:, None] - np.arange(n_keys)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def softmax(scores):
    """Softmax over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _residual_rule(x, y, op):
    if x.shape != y.shape:
        raise ShapeError(f"{op}: {x.shape} and {y.shape} differ")
    return x, ((op, cost(reads=[x, y], writes=[x], elementwise_flops=x.shape[0] * x.shape[1])),)


@operation(_residual_rule)
def residual(x, y, *, op):
    """Add what a block computed to what came in: (N, d) + (N, d); `op` names the entry."""
    return x + y


def _swiglu_rule(gate, up):
    if gate.shape != up.shape:
        raise ShapeError(f"mlp_act: gate {gate.shape} and up {up.shape} differ")
    # exp, + 1, divide, times up
    return gate, (("mlp_act", cost(reads=[gate, up], writes=[gate], elementwise_flops=4 * gate.shape[0] * gate.shape[1])),)


@operation(_swiglu_rule)
def swiglu(gate, up):
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)): (N, d_ff), (N, d_ff) -> (N, d_ff).

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. 6.
    """
    with np.errstate(over="ignore"):  # exp(-x) may be infinite; x / inf is the right limit, 0
        out = np.exp(-gate)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


def _sample_rule(logits):
    batch, vocab_size = logits.shape
    out = spec((batch,), None, "token")
    return out, (("sample", cost(reads=[logits], elementwise_flops=batch * (vocab_size - 1))),)


@operation(_sample_rule)
def sample(logits):
    """The token of the largest logit in each row: (B, vocab_size) -> (B,) ids."""
    return logits.argmax(axis=-1)
