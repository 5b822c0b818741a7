"""What an MLP does between its projections, elementwise: one operation for each kind.

All are entered as mlp_act; conventions are those of `npinfer.ops`.
"""

from functools import partial

import numpy as np

from npinfer.errors import ShapeError
from npinfer.ledger import cost
from npinfer.operation import operation

TILE_ELEMENTS = 2**16  # worked at once: 256 KiB, which a cache holds from one pass over them to the next


def _act_rule(flops):
    def rule(*operands, **_):
        x = operands[0]
        if any([other.shape != x.shape for other in operands]):
            raise ShapeError(f"mlp_act: gate {x.shape} and up {operands[-1].shape} differ")
        n_elements = x.shape[0] * x.shape[1]
        return x, (("mlp_act", cost(reads=operands, writes=[x], elementwise_flops=flops * n_elements)),)

    return rule


def _by_rows(write, *operands):
    """What `write(*operands, out)` writes, some rows at a time."""
    out = np.empty_like(operands[0], order="C")
    n_rows = max(1, TILE_ELEMENTS // out.shape[1])
    if len(out) <= n_rows:  # a decode step has no time to slice what is one piece
        write(*operands, out)
        return out
    for start in range(0, len(out), n_rows):
        rows = slice(start, start + n_rows)
        write(*[x[rows] for x in operands], out[rows])
    return out


@operation(_act_rule(4))  # exp, + 1, divide, times up
def swiglu(gate, up):
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)): (N, d_ff), (N, d_ff) -> (N, d_ff).

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. 6.
    """
    return _by_rows(_swiglu, gate, up)


def _swiglu(gate, up, out):
    np.negative(gate, out=out)
    np.exp(out, out=out)  # may be infinite; x / inf is the right limit, 0
    out += 1
    np.divide(gate, out, out=out)
    out *= up


@operation(_act_rule(9))  # min, max and min, times alpha, exp, + 1, divide, up + 1, times it
def clamped_swiglu(gate, up, *, limit, alpha):
    """g * sigmoid(alpha * g) * (u + 1) of the gate g cut off above `limit`, and up u on both sides.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925, section 2.2, and
    transformers, src/transformers/models/gpt_oss/modeling_gpt_oss.py.
    """
    return _by_rows(partial(_clamped_swiglu, limit, alpha), gate, up)


def _clamped_swiglu(limit, alpha, gate, up, out):
    gate = np.minimum(gate, limit)
    up = np.minimum(np.maximum(up, -limit), limit)
    np.multiply(gate, -alpha, out=out)
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up + 1


@operation(_act_rule(10))
def geglu(gate, up):
    """gelu(gate) * up: (N, d_ff), (N, d_ff) -> (N, d_ff).

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6, with the tanh form of GELU.
    """
    return _by_rows(_geglu, gate, up)


def _geglu(gate, up, out):
    _gelu(gate, out)
    out *= up


@operation(_act_rule(9))
def gelu(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))): (N, d_ff) -> (N, d_ff).

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    return _by_rows(_gelu, x)


def _gelu(x, out):
    np.multiply(x, x, out=out)
    out *= x
    out *= 0.044715
    out += x
    out *= 0.7978845608028654  # sqrt(2 / pi)
    np.tanh(out, out=out)
    out += 1
    out *= x
    out *= 0.5


def act_of(config):
    """The activation of a model: an operation on the projections of its MLPs."""
    if config.mlp_act == "clamped_swiglu":
        return clamped_swiglu.fixed(limit=config.act_limit, alpha=config.act_alpha)
    return {"swiglu": swiglu, "geglu": geglu, "gelu": gelu}[config.mlp_act]
