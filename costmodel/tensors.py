"""Every weight of a model: what its counts, its parameters and its bytes are all worked from.

`tensors` is the text to read.  It shares no code with `npinfer.weights`, which
lays real weights out; that both have the same parameters is what tests show.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from costmodel import storage


class Tensor(NamedTuple):
    """A weight that some layers have, in one shape.

    Attributes
    ----------
    name : str
        As `precision.exceptions` call it.
    shape : tuple of int
        (d_out, d_in) of a matrix, (n,) of a vector.
    layers : tuple of int
        Those that have it; (None,) for a weight outside the layers.
    n_copies : int
        Experts of a layer that have one each.
    """

    name: str
    shape: tuple
    layers: tuple
    n_copies: int = 1

    @property
    def n_parameters(self):
        """Elements in all layers together."""
        return prod(self.shape) * len(self.layers) * self.n_copies

    def formats(self, precision, layers=None):
        """Format -> number of layers stored in it; of all that have the tensor, or of `layers`."""
        is_matrix = len(self.shape) == 2 and self.name != "positions"  # a table of positions is stored as a vector
        return storage.formats(precision, self.name, self.layers if layers is None else layers, is_matrix)

    def nbytes(self, format_):
        """Stored bytes of one copy in one layer."""
        d_out, d_in = self.shape if len(self.shape) == 2 else (1, *self.shape)
        return storage.matrix_bytes(format_, d_out, d_in)

    def total_bytes(self, precision):
        """Stored bytes in all layers together, of one copy."""
        return sum([n_layers * self.nbytes(format_) for format_, n_layers in self.formats(precision).items()])


@lru_cache(maxsize=256)
def tensors(config):
    """Every `Tensor` of a model by its name, a tied head left out.

    Names of experts' matrices are prefixed with "expert.": other layers may
    have a matrix of the same name in another shape.
    """
    d, table = config.d_model, {}

    def add(layers, *shape, bias=False, n_copies=1, prefix="", **present):
        for name, is_there in present.items():
            if is_there and layers:
                table[prefix + name] = Tensor(name, shape, layers, n_copies)
                if bias:
                    table[f"{prefix}{name}.bias"] = Tensor(f"{name}.bias", shape[:1], layers, n_copies)

    once, every = (None,), tuple(range(config.n_layers))
    has_bias = config.norm == "layer"
    add(once, config.vocab_size, d, embed=True, lm_head=not config.tie_embeddings)
    add(once, config.max_context, d, positions=config.learned_positions)
    add(once, d, bias=has_bias, final_norm=True)
    add(every, d, bias=has_bias, attn_norm=config.pre_norm, mlp_norm=config.pre_norm)
    add(every, d, bias=has_bias, post_attn_norm=config.post_norm, post_mlp_norm=config.post_norm)
    add(every, config.n_heads, sinks=config.attn_sinks)
    _add_projections(config, add, every)
    _add_mlp(config, add)
    return table


def _add_projections(config, add, layers):
    d, n_heads, head_dim, latent = config.d_model, config.n_heads, config.head_dim, config.latent
    d_q, d_kv = n_heads * head_dim, config.n_kv_heads * head_dim
    add(layers, d, n_heads * config.value_dim, bias=config.o_bias, o_proj=True)
    if latent is None:
        add(layers, d_q, d, bias=config.qkv_bias, q_proj=True)
        add(layers, d_kv, d, bias=config.qkv_bias, k_proj=True, v_proj=True)
        by_head = config.qk_norm == "head"
        add(layers, head_dim if by_head else d_q, q_norm=config.qk_norm is not None)
        add(layers, head_dim if by_head else d_kv, k_norm=config.qk_norm is not None)
        return
    if latent.q_rank is None:
        add(layers, d_q, d, q_proj=True)
    else:
        add(layers, latent.q_rank, d, q_down=True)
        add(layers, latent.q_rank, q_norm=True)
        add(layers, d_q, latent.q_rank, q_up=True)
    nope = head_dim - latent.rope_dim
    add(layers, latent.kv_rank + latent.rope_dim, d, kv_down=True)
    add(layers, latent.kv_rank, k_norm=True)
    add(layers, n_heads * (nope + latent.value_dim), latent.kv_rank, kv_expand=True)


def _add_mlp(config, add):
    d, d_ff, experts, bias = config.d_model, config.d_ff, config.experts, config.mlp_bias
    dense = tuple([layer for layer, kind in enumerate(config.kinds) if not kind.sparse])
    add(dense, d_ff, d, bias=bias, gate_proj=config.gated, up_proj=True)
    add(dense, d, d_ff, bias=bias, down_proj=True)
    if experts is None:
        return
    sparse = tuple([layer for layer, kind in enumerate(config.kinds) if kind.sparse])
    add(sparse, experts.n_experts, d, bias=experts.router_bias, router=True)
    add(sparse, experts.n_experts, router_correction=experts.gate == "sigmoid")
    each = {"bias": bias, "n_copies": experts.n_experts, "prefix": "expert."}
    add(sparse, experts.d_ff, d, **each, gate_proj=True, up_proj=True)
    add(sparse, d, experts.d_ff, **each, down_proj=True)
    if experts.n_shared:
        width = experts.n_shared * experts.d_ff
        add(sparse, width, d, shared_gate_proj=True, shared_up_proj=True)
        add(sparse, d, width, shared_down_proj=True)
