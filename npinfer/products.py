"""Products of activations with weights: one projection, or several that share their input.

Conventions are those of `npinfer.ops`; `linear` is the function to read.
"""

import numpy as np

from npinfer.errors import ShapeError
from npinfer.formats import spread
from npinfer.ledger import cost
from npinfer.operation import operation
from npinfer.specs import spec
from npinfer.storage import PACKED, widen

TILE_ELEMENTS = 2**18  # weights widened at once: 1 MiB, which a cache holds until they are multiplied


def projection_flops(n, matrix, bias):
    """Matrix and elementwise FLOPs of `n` rows times a matrix: the product, its scales and its bias."""
    d_out, d_in = matrix.shape
    # Scales of a row (int8) multiply the product, scales of a group (int4) the weights.
    flops = 0 if not matrix.scaled else n * d_out if matrix.format.group == 0 else d_in * d_out
    return {"matmul_flops": 2 * n * d_in * d_out, "elementwise_flops": flops + (n * d_out if bias is not None else 0)}


def _linear_rule(x, parts, softcap=None):
    n, d_in = x.shape
    outs, costs = [], []
    for matrix, bias in parts:
        d_out, w_d_in = matrix.shape
        if w_d_in != d_in:
            raise ShapeError(f"{matrix.name}: x has d_in={d_in} but w has d_in={w_d_in} (x {x.shape}, w {matrix.shape})")
        out = spec((n, d_out), x.format)
        flops = projection_flops(n, matrix, bias)
        if softcap is not None:
            flops["elementwise_flops"] += 3 * n * d_out
        outs.append(out)
        costs.append((matrix.name, cost([x, matrix] if bias is None else [x, matrix, bias], [out], **flops)))
    return (outs[0] if len(outs) == 1 else tuple(outs)), tuple(costs)


@operation(_linear_rule)
def linear(x, w):
    """Multiply activations by one weight matrix, or by several that share the input.

    Parameters
    ----------
    x : Array (N, d_in)
    w : Array of joined weights
        Spec: `npinfer.specs.joined` (matrix, bias or None) pairs, one for each
        projection, matrices (d_out, d_in).  Data: a `npinfer.weights.Matrix`
        whose rows are those of all the projections.

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
    out = product(x, w)
    if len(w.splits) == 1:
        return out
    parts = []
    for part in w.splits:
        parts.append(out[part])
    return parts


def _side_by_side_rule(x, parts):
    d_out = sum([matrix.shape[0] for matrix, _ in parts])
    return spec((x.shape[0], d_out), x.format), _linear_rule(x, parts)[1]


@operation(_side_by_side_rule)
def linear_side_by_side(x, w):
    """As `linear`, the results of the projections next to each other: (N, d_in) -> (N, sum of d_out)."""
    return product(x, w)


@operation(_linear_rule)
def capped_linear(x, w, *, softcap):
    """Multiply activations by one weight matrix; the result becomes softcap * tanh(result / softcap)."""
    return capped(product(x, w), softcap)


def product(x, w):
    """x times all rows of a `npinfer.weights.Matrix`, its scales and its bias: (N, d_in) -> (N, sum of d_out)."""
    out = _product_by_tiles(x, w) if w.tiled else x @ w.rows.T
    if w.scales is not None and not w.format.group:
        out *= w.scales[:, 0]
    if w.bias is not None:
        out += w.bias
    return out


def _product_by_tiles(x, w):
    """x times rows that are packed, or have scales within: widened some at a time, so that they never all are."""
    d_in = x.shape[-1]
    out = np.empty_like(x, order="C", shape=(len(x), len(w.rows)))
    n_rows = max(1, TILE_ELEMENTS // d_in)
    space = np.empty((n_rows, d_in), np.float32)
    for start in range(0, len(w.rows), n_rows):
        tile = slice(start, start + n_rows)
        values = values_of(w, tile, space)
        if w.format.group:
            values = values * spread(w.scales[tile], d_in, w.format)
        np.matmul(x, values.T, out=out[:, tile])
    return out


def capped(x, cap):
    """cap * tanh(x / cap), in place: nearly x where that is small, and never beyond the cap.

    Source: Gemma Team 2024, "Gemma 2", arXiv:2408.00118, section 2, "Logit soft-capping".
    """
    x /= cap
    np.tanh(x, out=x)
    x *= cap
    return x


def values_of(matrix, rows, space=None):
    """Some rows of a matrix, its scales left out; packed ones are widened, into `space` if that is given."""
    kept = matrix.rows[rows]
    if kept.dtype not in PACKED:
        return kept
    out = np.empty(kept.shape, np.float32) if space is None else space[: len(kept)]
    widen(kept, out)
    return out
