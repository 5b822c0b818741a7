"""Weights as the products stream them: laid out once, when they are loaded.

A matrix is (d_out, d_in), a row for each output, as published checkpoints
store it: a product reads it front to back, and a tied head is the embedding
itself.  Projections that share an input are joined into one matrix.

`npinfer.tensors` says which tensors there are; where their values come from (a
seed, a checkpoint, nowhere) is the business of the `source` that `build` is given.
"""

import os
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import groupby, starmap
from typing import NamedTuple

import numpy as np

from npinfer import ops, products
from npinfer.activations import act_of
from npinfer.attention import attend_of, kv_expand
from npinfer.formats import Format, quantised, rounded
from npinfer.layers import MLP, Attention, ExpertMLP, LatentAttention, Layer, no_norm
from npinfer.operation import NOTHING
from npinfer.specs import Array, joined, spec
from npinfer.storage import PACKED, packed
from npinfer.tensors import layer_tensors, model_tensors, norm_widths

THREADED_D_MODEL = 1024  # smaller layers are laid out sooner than threads start


class Matrix(NamedTuple):
    """Data of joined projections.

    Attributes
    ----------
    rows : array (sum of d_out, d_in)
        Values rounded to the storage format; for int8 and int4, the codes.
        float32, or packed as `npinfer.storage` does it.
    scales : float32 array (sum of d_out, n_groups) or None
        One for each row (int8) or each `format.group` inputs of it (int4).
    bias : float32 array (sum of d_out,) or None
    splits : tuple
        Index of the part of the product that belongs to each projection.
    format : Format
    tiled : bool
        Whether rows have to be widened, or scaled, before they are multiplied.
    """

    rows: np.ndarray
    scales: np.ndarray | None
    bias: np.ndarray | None
    splits: tuple
    format: Format
    tiled: bool


@dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """All weights of a model.

    `layers` pairs each run of layers with its kind and its `Layer`; `embed` and
    `head` are the operations that use the two matrices outside of them.
    """

    embedding: Array
    positions: Array
    layers: tuple
    final_norm: object
    lm_head: Array
    embed: object
    head: object

    def values(self):
        """Yield every NumPy array of a numeric model, a tied head once."""
        tied = self.lm_head.data is self.embedding.data
        for part in (self.embedding, self.positions, self.layers, self.final_norm, NOTHING if tied else self.lm_head):
            yield from _values(part)


def _values(part):
    """Yield the NumPy arrays inside arrays, matrices, norms, layers and tuples of them."""
    if isinstance(part, np.ndarray):
        yield part
    elif isinstance(part, Array):
        yield from _values(part.data)
    elif isinstance(part, partial):
        yield from _values(part.args)
    elif isinstance(part, tuple):
        for each in part:
            yield from _values(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _values(getattr(part, field.name))


def build(config, precision, source=None, touched="expected", pack=False, gain_offset=0.0):
    """Lay out the weights of a model.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    source : callable, optional
        `source(name, layer, shape, expert)` gives a float32 array (layer None
        outside the layers, expert None outside the experts).  Without it the
        weights have specs only, and equal neighbours among the layers share
        them.
    touched : {"expected", "all"}
        Experts that a forward reads where there is no source.
    pack : bool
        Whether matrices stay in as few bits as their format has.
    gain_offset : float
        Added to the gains of norms once they are rounded to their format.

    Returns
    -------
    Weights
    """
    options = touched, pack, gain_offset
    outside = _Builder(config, precision, source, None, model_tensors(config), *options)
    embedding = outside.matrices("embed")
    if config.tie_embeddings:
        table = embedding.spec[0][0]
        lm_head = Array(joined((spec(table.shape, table.format, "weight", "lm_head"), None)), embedding.data)
    else:
        lm_head = outside.matrices("lm_head")
    softcap = config.final_softcap
    embed = ops.embed.fixed(scale=config.d_model**0.5 if config.scale_embeddings else None)
    head = products.linear if softcap is None else products.capped_linear.fixed(softcap=softcap)

    def layer(layers_of, kind):
        builder = _Builder(config, precision, source, layers_of[0], layer_tensors(config, kind), *options)
        return layers_of, kind, builder.layer(kind)

    numeric = source is not None
    each = _in_threads if numeric and config.d_model >= THREADED_D_MODEL else starmap
    layers = tuple(each(layer, _runs(config, precision, single=numeric)))
    table = Array(embedding.spec[0][0], embedding.data)
    positions = outside.vector("positions") if config.learned_positions else NOTHING
    return Weights(table, positions, layers, outside.norm("final_norm"), lm_head, embed, head)


def _in_threads(function, arguments):
    """`function` of each tuple of arguments, in order; NumPy lets threads fill and round large arrays side by side."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda each: function(*each), arguments))


def _runs(config, precision, single):
    """Ranges of layers that share their weights' specs, with their kind; one by one if they have values."""
    for run, kind in config.runs():
        groups = groupby(run, (lambda layer: layer) if single else precision.exceptions_of)
        for _, layers in groups:
            layers = list(layers)
            yield range(layers[0], layers[-1] + 1), kind


class _Builder:
    """Turns tensors of a source into the weights of one layer, or of what lies outside the layers."""

    def __init__(self, config, precision, source, layer, shapes, touched, pack, gain_offset):
        self.config, self.precision, self.source, self.at, self.shapes = config, precision, source, layer, shapes
        self.touched, self.keep, self.gain_offset = touched, packed if pack else rounded, np.float32(gain_offset)

    def layer(self, kind):
        return Layer(
            attn_norm=self.norm("attn_norm"),
            attention=self.latent_attention(kind) if self.config.latent else self.attention(kind),
            post_attn_norm=self.norm("post_attn_norm"),
            mlp_norm=self.norm("mlp_norm"),
            mlp=self.experts() if kind.sparse else self.mlp(),
            post_mlp_norm=self.norm("post_mlp_norm"),
        )

    def attention(self, kind):
        config = self.config
        n_heads, n_kv_heads, rope = config.n_heads, config.n_kv_heads, partial(ops.rope.fixed, head_dim=config.head_dim)
        return Attention(
            qkv=self.matrices("q_proj", "k_proj", "v_proj"),
            q_norm=self.rms_norm("q_norm", config.norm_eps),
            k_norm=self.rms_norm("k_norm", config.norm_eps),
            norm_widths=norm_widths(config),
            sinks=self.vector("sinks"),
            o_proj=self.matrices("o_proj"),
            head_dim=config.head_dim,
            rope=rope(turned=(n_heads, n_kv_heads), others=(n_kv_heads,)),
            q_rope=rope(turned=(n_heads,)),
            k_rope=rope(turned=(n_kv_heads,)),
            attend=attend_of(config, kind.window),
        )

    def latent_attention(self, kind):
        config, latent = self.config, self.config.latent
        direct = latent.q_rank is None
        return LatentAttention(
            q_down=NOTHING if direct else self.matrices("q_down"),
            q_norm=self.rms_norm("q_norm", latent.norm_eps),
            q_up=self.matrices("q_proj" if direct else "q_up"),
            kv_down=self.matrices("kv_down"),
            k_norm=self.rms_norm("k_norm", latent.norm_eps),
            kv_up=self.matrices("kv_expand"),
            o_proj=self.matrices("o_proj"),
            latent=latent,
            q_rope=ops.rope.fixed(
                head_dim=config.head_dim, turned=(config.n_heads,), n_kept=config.head_dim - latent.rope_dim
            ),
            k_rope=ops.rope.fixed(head_dim=latent.rope_dim, turned=(1,)),
            expand=kv_expand.fixed(
                n_heads=config.n_heads, rope_dim=latent.rope_dim, value_dim=latent.value_dim,
                format_=self.precision.activations,
            ),
            attend=attend_of(config, kind.window),
        )

    def mlp(self, prefix=""):
        names = [name for name in ("gate_proj", "up_proj") if prefix + name in self.shapes]
        return MLP(self.matrices(*names, prefix=prefix), self.matrices("down_proj", prefix=prefix), act_of(self.config))

    def experts(self):
        config = self.config
        return ExpertMLP(
            router=self.matrices("router"),
            correction=self.vector("router_correction"),
            gate_up=self.of_experts("gate_proj", "up_proj"),
            down_proj=self.of_experts("down_proj"),
            shared=self.mlp("shared_") if config.experts.n_shared else None,
            act=act_of(config),
            experts=config.experts,
            touched=self.touched,
        )

    def norm(self, name):
        """A norm as the family has it, if it has it."""
        if self.config.norm == "rms":
            return self.rms_norm(name, self.config.norm_eps)
        if name not in self.shapes:
            return no_norm
        return partial(ops.layer_norm.fixed(eps=self.config.norm_eps), self.vector(name), self.vector(name + ".bias"))

    def rms_norm(self, name, eps):
        if name not in self.shapes:
            return no_norm
        gain = self.vector(name)
        if self.gain_offset and gain.data is not None:
            gain = Array(gain.spec, gain.data + self.gain_offset)
        return partial(ops.rms_norm.fixed(eps=eps), gain)

    def vector(self, name):
        """A gain, or another array that is no matrix: kept at 16 bits or more.  NOTHING if there is none."""
        if name not in self.shapes:
            return NOTHING
        shape, format_ = self.shapes[name], self.precision.format_of(name, self.at, is_matrix=False)
        return Array(spec(shape, format_, "weight", name), self.values(name, shape, format_))

    def values(self, name, shape, format_, expert=None):
        return None if self.source is None else rounded(self.source(name, self.at, shape, expert), format_)

    def matrices(self, *names, prefix=""):
        """Projections that share their input, joined."""
        specs = joined(*[self.specs(name, prefix, self.shapes) for name in names])
        return Array(specs, None if self.source is None else self.matrix(specs, prefix))

    def of_experts(self, *names):
        """The same for each of a layer's experts: the specs of one, and the values of all."""
        shapes = {name: shape[1:] for name, shape in self.shapes.items()}
        specs = joined(*[self.specs(name, "", shapes) for name in names])
        numbers = range(self.config.experts.n_experts)
        return Array(specs, None if self.source is None else tuple([self.matrix(specs, "", expert) for expert in numbers]))

    def specs(self, name, prefix, shapes):
        """Specs of a matrix, and of its bias or None; what is shared by all tokens is entered under the same names."""
        tensor, bias = prefix + name, prefix + name + ".bias"
        matrix = spec(shapes[tensor], self.precision.format_of(tensor, self.at, is_matrix=True), "weight", name)
        if bias not in shapes:
            return matrix, None
        return matrix, spec(shapes[bias], self.precision.format_of(bias, self.at, is_matrix=False), "weight", name)

    def matrix(self, specs, prefix, expert=None):
        """`Matrix` of the projections, one below the other."""
        parts = []
        for matrix, bias in specs:
            rows, scales = self.source(prefix + matrix.name, self.at, matrix.shape, expert), None
            if matrix.format.group is not None:
                rows, scales = quantised(rows, matrix.format)
            if bias is not None:
                bias = self.values(prefix + matrix.name + ".bias", bias.shape, bias.format, expert)
            parts.append((self.keep(rows, matrix.format), scales, bias))
        rows, scales, biases = [each[0] if len(each) == 1 or each[0] is None else np.concatenate(each) for each in zip(*parts)]
        stops = np.cumsum([matrix.shape[0] for matrix, _ in specs]).tolist()
        splits = tuple([np.s_[:, start:stop] for start, stop in zip([0, *stops], stops)])
        format_ = specs[0][0].format
        return Matrix(rows, scales, biases, splits, format_, tiled=rows.dtype in PACKED or bool(format_.group))
