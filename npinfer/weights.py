"""Weights as the products stream them: laid out once, when they are loaded.

A matrix is (d_out, d_in), a row for each output, as published checkpoints
store it: a product reads it front to back, and a tied head is the embedding
itself.  Projections that share an input are joined into one matrix.

`layer_tensors` says which tensors a layer has; where their values come from (a
seed, a checkpoint, nowhere) is the business of the `source` that `build` is given.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from npinfer.formats import quantised, rounded
from npinfer.specs import Array, spec


class Matrix(NamedTuple):
    """Data of joined projections.

    Attributes
    ----------
    rows : float32 array (sum of d_out, d_in)
        Values rounded to the storage format; for int8, the codes.
    scales, bias : float32 array (sum of d_out,) or None
    splits : tuple of slice
        The columns of the product that belong to each projection.
    """

    rows: np.ndarray
    scales: np.ndarray | None
    bias: np.ndarray | None
    splits: tuple


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer, in the order they are used."""

    attn_norm: Array
    qkv: Array
    o_proj: Array
    mlp_norm: Array
    gate_up: Array
    down_proj: Array


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model; `layers` pairs each run of layers with its window and weights."""

    embedding: Array
    layers: tuple
    final_norm: Array
    lm_head: Array

    def values(self):
        """Yield every NumPy array of a numeric model, a tied head once."""
        layers = [getattr(w, field) for _, _, w in self.layers for field in LayerWeights.__slots__]
        head = [] if self.lm_head.data is self.embedding.data else [self.lm_head]
        for array in [self.embedding, *layers, self.final_norm, *head]:
            parts = array.data[:3] if isinstance(array.data, Matrix) else [array.data]
            yield from [part for part in parts if part is not None]


def layer_tensors(config, kind=None):
    """Shape of every tensor of one layer of a `LayerKind`, by name; a matrix is (d_out, d_in), those of experts (E, d_out, d_in)."""
    d, hd, nh = config.d_model, config.head_dim, config.n_heads
    d_q, d_kv, d_v = nh * hd, config.n_kv_heads * hd, nh * config.value_dim
    kind = kind or config.kinds[0]
    shapes, latent, experts = {}, config.latent, config.experts
    norms = ["attn_norm", "mlp_norm"] * config.pre_norm + ["post_attn_norm", "post_mlp_norm"] * config.post_norm
    for name in norms:
        shapes[name] = (d,)
        if config.norm == "layer":
            shapes[name + ".bias"] = (d,)
    if latent:
        matrices = {"q_down": (latent.q_rank, d, False), "q_up": (d_q, latent.q_rank, False)} if latent.q_rank else {"q_proj": (d_q, d, False)}
        if latent.q_rank:
            shapes["q_norm"] = (latent.q_rank,)
        matrices["kv_down"] = (latent.kv_rank + latent.rope_dim, d, False)
        shapes["k_norm"] = (latent.kv_rank,)
        matrices["kv_expand"] = (nh * (hd - latent.rope_dim + latent.value_dim), latent.kv_rank, False)
    else:
        matrices = {"q_proj": (d_q, d, config.qkv_bias), "k_proj": (d_kv, d, config.qkv_bias), "v_proj": (d_kv, d, config.qkv_bias)}
        if config.qk_norm:
            full = config.qk_norm == "full"
            shapes |= {"q_norm": (d_q if full else hd,), "k_norm": (d_kv if full else hd,)}
    if config.attn_sinks:
        shapes["sinks"] = (nh,)
    matrices["o_proj"] = (d, d_v, config.o_bias)

    def mlp(prefix, f, lead=()):
        named = {prefix + "gate_proj": (f, d)} if config.gated else {}
        named |= {prefix + "up_proj": (f, d), prefix + "down_proj": (d, f)}
        for name, shape in named.items():
            shapes[name] = lead + shape
            if config.mlp_bias:
                shapes[name + ".bias"] = lead + shape[:1]

    if kind.sparse:
        matrices["router"] = (experts.n_experts, d, experts.router_bias)
        if experts.gate == "sigmoid":
            shapes["router_correction"] = (experts.n_experts,)
        mlp("", experts.d_ff, (experts.n_experts,))
        if experts.n_shared:
            mlp("shared_", experts.n_shared * experts.d_ff)
    else:
        mlp("", config.d_ff)
    for name, (d_out, d_in, has_bias) in matrices.items():
        shapes[name] = (d_out, d_in)
        if has_bias:
            shapes[name + ".bias"] = (d_out,)
    return shapes


def model_tensors(config):
    """Shape of every tensor outside the layers, by name."""
    shapes = {"embed": (config.vocab_size, config.d_model), "final_norm": (config.d_model,)}
    if config.norm == "layer":
        shapes["final_norm.bias"] = (config.d_model,)
    if config.learned_positions:
        shapes["positions"] = (config.max_context, config.d_model)
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.d_model)
    return shapes


def build(config, precision, source=None):
    """Lay out the weights of a model.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    source : callable, optional
        `source(name, layer, shape)` gives a float32 array (layer None outside
        the layers).  Without it the weights have specs only, and equal
        neighbours among the layers share them.

    Returns
    -------
    Weights
    """
    weights = _Builder(precision, source)
    shapes = model_tensors(config)
    embedding = weights.matrices(["embed"], shapes)
    if config.tie_embeddings:
        head = Array(((_renamed(embedding.spec[0][0], "lm_head"), None),), embedding.data)
    else:
        head = weights.matrices(["lm_head"], shapes)
    layers = []
    for run, window in config.runs():
        for layers_of in [run] if source is None else [range(layer, layer + 1) for layer in run]:
            layers.append((layers_of, window, weights.layer(layer_tensors(config), layers_of[0])))
    table = Array(embedding.spec[0][0], embedding.data)
    return Weights(table, tuple(layers), weights.vector("final_norm", shapes), head)


def _renamed(matrix, name):
    return spec(matrix.shape, matrix.format, "weight", name)


class _Builder:
    """Turns tensors of a source into weights of a precision."""

    def __init__(self, precision, source):
        self.matrix_format, self.vector_format, self.source = precision.matrices, precision.vectors, source

    def layer(self, shapes, layer):
        return LayerWeights(
            attn_norm=self.vector("attn_norm", shapes, layer),
            qkv=self.matrices(["q_proj", "k_proj", "v_proj"], shapes, layer),
            o_proj=self.matrices(["o_proj"], shapes, layer),
            mlp_norm=self.vector("mlp_norm", shapes, layer),
            gate_up=self.matrices(["gate_proj", "up_proj"], shapes, layer),
            down_proj=self.matrices(["down_proj"], shapes, layer),
        )

    def vector(self, name, shapes, layer=None):
        """A gain: kept at 16 bits or more."""
        values = None
        if self.source is not None:
            values = rounded(self.source(name, layer, shapes[name]), self.vector_format)
        return Array(spec(shapes[name], self.vector_format, "weight", name), values)

    def matrices(self, names, shapes, layer=None):
        """Projections that share their input, joined."""
        specs = []
        for name in names:
            bias = shapes.get(name + ".bias")
            matrix = spec(shapes[name], self.matrix_format, "weight", name)
            specs.append((matrix, None if bias is None else spec(bias, self.vector_format, "weight", name)))
        return Array(tuple(specs), None if self.source is None else self._joined(names, shapes, layer))

    def _joined(self, names, shapes, layer):
        parts = [self.source(name, layer, shapes[name]) for name in names]
        biases = [
            rounded(self.source(name + ".bias", layer, shapes[name + ".bias"]), self.vector_format)
            for name in names
            if name + ".bias" in shapes
        ]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        scales = None
        if self.matrix_format == "int8":
            rows, scales = quantised(rows)
        else:
            rows = rounded(rows, self.matrix_format)
        splits, start = [], 0
        for part in parts:
            splits.append(slice(start, start + len(part)))
            start += len(part)
        return Matrix(rows, scales, np.concatenate(biases) if biases else None, tuple(splits))


def random_source(seed):
    """A source of normally distributed weights; the same seed gives the same model.

    Matrices have standard deviation 1 / sqrt(d_in), so that activations keep
    their size through the layers; gains are near 1 and biases near 0, not
    equal to them, so that leaving one out shows.
    """
    rng = np.random.default_rng(seed)

    def source(name, layer, shape):
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values *= np.float32(shape[1] ** -0.5)
        else:
            values *= np.float32(0.1)
            if name.endswith("norm"):
                values += np.float32(1)
        return values

    return source
