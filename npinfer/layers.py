"""The blocks that a decoder layer is made of, each holding its weights: norm, attention, MLP.

What one family has and another has not is decided when the weights are laid
out, by which of these classes a layer gets and by parts that are absent; the
equations read the same for all.
"""

from dataclasses import dataclass
from typing import NamedTuple

from npinfer import ops
from npinfer.activations import Act
from npinfer.attention import attention, kv_expand
from npinfer.experts import experts, n_touched, route
from npinfer.operation import NOTHING
from npinfer.parts import Experts, Latent
from npinfer.specs import Array, columns, view


class Here(NamedTuple):
    """What a forward is about, as a layer sees it.

    Attributes
    ----------
    batch, n_new : int
        B and T.
    cache : KVCache
    layers : range
        The layer, or the equal neighbours that it stands for.
    window : int or None
    rotation : Array (2, T, rope_dim / 2)
    """

    batch: int
    n_new: int
    cache: object
    layers: range
    window: int | None
    rotation: Array

    def heads(self, x, width):
        """(N, n_heads * width) -> (B, n_heads, T, width)"""
        return view(x, (self.batch, self.n_new, x.shape[1] // width, width), axes=(0, 2, 1, 3))

    def rotated(self, x):
        return ops.rope(x, self.rotation) if self.rotation.shape[2] else x


@dataclass(frozen=True, eq=False, repr=False)  # each method made costs import time
class RMSNorm:
    gain: Array
    eps: float

    def __call__(self, x):
        return ops.rms_norm(x, self.gain, eps=self.eps)


@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm:
    gain: Array
    bias: Array
    eps: float

    def __call__(self, x):
        return ops.layer_norm(x, self.gain, self.bias, eps=self.eps)


def no_norm(x):
    """In the place of a norm that a family does not have."""
    return x


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """Queries, keys and values of their own; the heads of a group share keys and values.

    `q_norm` and `k_norm` see rows of `norm_width`: a head, or a whole projection.
    """

    qkv: Array
    q_norm: object
    k_norm: object
    norm_widths: tuple
    sinks: Array
    o_proj: Array
    head_dim: int
    scores: dict  # scale and softcap

    def __call__(self, h, here):
        q, k, v = ops.linear(h, self.qkv)
        q, k = [
            here.rotated(here.heads(_by_rows(norm, x, width), self.head_dim))
            for x, norm, width in zip((q, k), (self.q_norm, self.k_norm), self.norm_widths)
        ]
        keys, values = ops.kv_append(here.cache, here.layers, k, here.heads(v, self.head_dim))
        a = attention(q, keys, values, self.sinks, window=here.window, **self.scores)
        return ops.linear(a, self.o_proj)


def _by_rows(norm, x, width):
    """A norm of each `width` elements of the rows of x."""
    return x if norm is no_norm else view(norm(view(x, (x.shape[0] * x.shape[1] // width, width))), x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class LatentAttention:
    """Keys and values expanded from one latent row for each token; part of a head is rotated, the rest has no position."""

    q_down: Array
    q_norm: object
    q_up: Array
    kv_down: Array
    k_norm: object
    kv_expand: Array
    o_proj: Array
    latent: Latent
    head_dim: int
    scores: dict  # scale and softcap

    def __call__(self, h, here):
        latent, nope = self.latent, self.head_dim - self.latent.rope_dim
        q = h if self.q_down is NOTHING else self.q_norm(ops.linear(h, self.q_down))
        q = here.heads(ops.linear(q, self.q_up), self.head_dim)
        q = ops.rope(q, here.rotation, n_kept=nope)

        compressed = ops.linear(h, self.kv_down)
        row = here.heads(self.k_norm(columns(compressed, 0, latent.kv_rank)), latent.kv_rank)
        k = here.rotated(here.heads(columns(compressed, latent.kv_rank, compressed.shape[1]), latent.rope_dim))
        (rows,) = ops.kv_append(here.cache, here.layers, row, k)
        keys, values = kv_expand(
            rows, self.kv_expand, n_heads=q.shape[1], rope_dim=latent.rope_dim, value_dim=latent.value_dim,
            format_=h.spec.format,
        )  # fmt: skip
        a = attention(q, keys, values, NOTHING, window=here.window, **self.scores)
        return ops.linear(a, self.o_proj)


@dataclass(frozen=True, eq=False, repr=False)
class MLP:
    """gate and up (or up alone), the activation, down."""

    gate_up: Array
    down_proj: Array
    act: Act

    def __call__(self, h):
        """The results to add to the residual stream, one."""
        hidden = ops.linear(h, self.gate_up)
        hidden = self.act(*hidden) if isinstance(hidden, list) else self.act(hidden)
        return [ops.linear(hidden, self.down_proj)]


@dataclass(frozen=True, eq=False, repr=False)
class ExpertMLP:
    """Experts that a router chooses for each token, and those that every token uses."""

    router: Array
    correction: Array
    gate_up: Array
    down_proj: Array
    shared: MLP | None
    act: Act
    experts: Experts
    touched: str  # of a shape-only run, which has no tokens

    def __call__(self, h):
        """The results to add to the residual stream: the chosen experts', and the shared ones'."""
        weights, ids = route(h, self.router, self.correction, experts=self.experts)
        touched = self.touched if ids.data is None else n_touched(ids.data)
        out = experts(h, weights, ids, self.gate_up, self.down_proj, act=self.act, experts=self.experts, touched=touched)
        return [out] if self.shared is None else [out, *self.shared(h)]


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """A decoder layer; a norm that the family does not have is `no_norm`."""

    attn_norm: object
    attention: Attention | LatentAttention
    post_attn_norm: object
    mlp_norm: object
    mlp: MLP | ExpertMLP
    post_mlp_norm: object

    def __call__(self, x, here):
        x = ops.residual(x, self.post_attn_norm(self.attention(self.attn_norm(x), here)), op="attn_residual")
        for part in self.mlp(self.mlp_norm(x)):
            x = ops.residual(x, self.post_mlp_norm(part), op="mlp_residual")
        return x
