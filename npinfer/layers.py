"""The blocks that a decoder layer is made of, each holding its weights: norm, attention, MLP.

What one family has and another has not is decided when the weights are laid
out, by which of these classes a layer gets and by parts that are absent; the
equations read the same for all.
"""

from dataclasses import dataclass
from typing import NamedTuple

from npinfer import ops, products
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
    rotation : Array (2, T, 1, 2, rope_dim / 2)
    """

    batch: int
    n_new: int
    cache: object
    layers: range
    rotation: Array

    def heads(self, x, width):
        """(N, n_heads * width) -> (B, n_heads, T, width)"""
        return view(x, (self.batch, self.n_new, x.shape[1] // width, width), axes=(0, 2, 1, 3))


def no_norm(x):
    """In the place of a norm that a family does not have."""
    return x


@dataclass(frozen=True, eq=False, repr=False)  # each method made costs import time
class Attention:
    """Queries, keys and values of their own; the heads of a group share keys and values.

    `q_norm` and `k_norm` see rows of `norm_widths`: a head, or a whole projection.
    """

    qkv: Array
    q_norm: object
    k_norm: object
    norm_widths: tuple
    sinks: Array
    o_proj: Array
    head_dim: int
    rope: object  # `ops.rope` for queries, keys and values
    q_rope: object  # for queries that have been normed by themselves
    k_rope: object
    attend: object  # `npinfer.attention.attention` with its scale, window and softcap

    def __call__(self, h, here):
        if self.q_norm is no_norm:
            q, k, v = self.rope(products.linear_side_by_side(h, self.qkv), here.rotation)
        else:
            q, k, v = products.linear(h, self.qkv)
            q = self.q_rope(_by_rows(self.q_norm, q, self.norm_widths[0]), here.rotation)
            k = self.k_rope(_by_rows(self.k_norm, k, self.norm_widths[1]), here.rotation)
            v = here.heads(v, self.head_dim)
        keys, values = ops.kv_append(here.cache, here.layers, k, v)
        a = self.attend(q, keys, values, self.sinks)
        return products.linear(a, self.o_proj)


def _by_rows(norm, x, width):
    """A norm of each `width` elements of the rows of x."""
    return view(norm(view(x, (x.shape[0] * x.shape[1] // width, width))), x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class LatentAttention:
    """Keys and values expanded from one latent row for each token; part of a head is rotated, the rest has no position."""

    q_down: Array
    q_norm: object
    q_up: Array
    kv_down: Array
    k_norm: object
    kv_up: Array
    o_proj: Array
    latent: Latent
    q_rope: object  # `ops.rope` with the width of heads, and what of it has no position
    k_rope: object
    expand: object  # `npinfer.attention.kv_expand` with its widths
    attend: object  # `npinfer.attention.attention` with its scale, window and softcap

    def __call__(self, h, here):
        rank = self.latent.kv_rank
        q = h if self.q_down is NOTHING else self.q_norm(products.linear(h, self.q_down))
        q = self.q_rope(products.linear(q, self.q_up), here.rotation)

        compressed = products.linear(h, self.kv_down)
        row = here.heads(self.k_norm(columns(compressed, 0, rank)), rank)
        k = self.k_rope(columns(compressed, rank, compressed.shape[1]), here.rotation)
        (rows,) = ops.kv_append(here.cache, here.layers, row, k)
        keys, values = self.expand(rows, self.kv_up)
        a = self.attend(q, keys, values, NOTHING)
        return products.linear(a, self.o_proj)


@dataclass(frozen=True, eq=False, repr=False)
class MLP:
    """gate and up (or up alone), the activation, down."""

    gate_up: Array
    down_proj: Array
    act: object  # an operation of `npinfer.activations`

    def __call__(self, h):
        """The results to add to the residual stream, one."""
        hidden = products.linear(h, self.gate_up)
        hidden = self.act(*hidden) if isinstance(hidden, list) else self.act(hidden)
        return [products.linear(hidden, self.down_proj)]


@dataclass(frozen=True, eq=False, repr=False)
class ExpertMLP:
    """Experts that a router chooses for each token, and those that every token uses."""

    router: Array
    correction: Array
    gate_up: Array
    down_proj: Array
    shared: MLP | None
    act: object  # an operation of `npinfer.activations`
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
    """A decoder layer; a norm is an operation with its gain given, and `no_norm` where the family has none."""

    attn_norm: object
    attention: Attention | LatentAttention
    post_attn_norm: object
    mlp_norm: object
    mlp: MLP | ExpertMLP
    post_mlp_norm: object

    def __call__(self, x, here):
        x = ops.attn_residual(x, self.post_attn_norm(self.attention(self.attn_norm(x), here)))
        for part in self.mlp(self.mlp_norm(x)):
            x = ops.mlp_residual(x, self.post_mlp_norm(part))
        return x
