"""What an MLP does between its projections, elementwise: one operation for each kind.

All are entered as mlp_act; conventions are those of `npinfer.ops`.
"""

import numpy as np

from npinfer.errors import ShapeError
from npinfer.ledger import cost
from npinfer.operation import operation


def _act_rule(flops):
    def rule(*operands, **_):
        x = operands[0]
        if any([other.shape != x.shape for other in operands]):
            raise ShapeError(f"mlp_act: gate {x.shape} and up {operands[-1].shape} differ")
        n_elements = x.shape[0] * x.shape[1]
        return x, (("mlp_act", cost(reads=operands, writes=[x], elementwise_flops=flops * n_elements)),)

    return rule


@operation(_act_rule(4))  # exp, + 1, divide, times up
def swiglu(gate, up):
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)): (N, d_ff), (N, d_ff) -> (N, d_ff).

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. 6.
    """
    out = -gate
    np.exp(out, out=out)  # may be infinite; x / inf is the right limit, 0
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


@operation(_act_rule(9))  # min, max and min, times alpha, exp, + 1, divide, up + 1, times it
def clamped_swiglu(gate, up, *, limit, alpha):
    """g * sigmoid(alpha * g) * (u + 1) of the gate g cut off above `limit`, and up u on both sides.

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925, section 2.2, and
    transformers, src/transformers/models/gpt_oss/modeling_gpt_oss.py.
    """
    gate = np.minimum(gate, limit)
    up = np.maximum(up, -limit)
    np.minimum(up, limit, out=up)
    out = gate * -alpha
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    up += 1
    out *= up
    return out


@operation(_act_rule(10))
def geglu(gate, up):
    """gelu(gate) * up: (N, d_ff), (N, d_ff) -> (N, d_ff).

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6, with the tanh form of GELU.
    """
    out = _gelu(gate)
    out *= up
    return out


@operation(_act_rule(9))
def gelu(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))): (N, d_ff) -> (N, d_ff).

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.
    """
    return _gelu(x)


def _gelu(x):
    out = x * x
    out *= x
    out *= 0.044715
    out += x
    out *= 0.7978845608028654  # sqrt(2 / pi)
    np.tanh(out, out=out)
    out += 1
    out *= x
    out *= 0.5
    return out


def act_of(config):
    """The activation of a model: an operation on the projections of its MLPs."""
    if config.mlp_act == "clamped_swiglu":
        return clamped_swiglu.fixed(limit=config.act_limit, alpha=config.act_alpha)
    return {"swiglu": swiglu, "geglu": geglu, "gelu": gelu}[config.mlp_act]
