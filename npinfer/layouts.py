"""How tensors of ours stand in a published checkpoint: under which name, and which part of what is stored they are."""

from typing import NamedTuple

import numpy as np

EXPERT_TENSORS = ("gate_proj", "up_proj", "down_proj")  # a sparse layer has one of each expert


class Stored(NamedTuple):
    """Where a tensor stands.

    Attributes
    ----------
    name : str
        Its name there, without what names of its layer begin with; {expert} is the number of one.
    fused : tuple of str
        Tensors of ours that are stored as one, rows one behind the other; () is this one alone.
    woven : bool
        Whether rows of the fused ones alternate instead.
    transposed : bool
        Whether it is stored (d_in, d_out).
    stacked : bool
        Whether it holds all experts, along a first axis.
    interleaved : {None, "heads", "rows"}
        Whether the last rope_dim rows, of each head or of all rows, have the pairs that RoPE turns side by side.
    """

    name: str
    fused: tuple = ()
    woven: bool = False
    transposed: bool = False
    stacked: bool = False
    interleaved: str | None = None


class Layout:
    """The tensors of a model as its family stores them.

    Parameters
    ----------
    family : npinfer.families.Family
    config : ModelConfig
    outside, inside : dict
        Shapes of our tensors outside the layers; those of a layer, by its `LayerKind`.
    bare : bool
        Whether the names lack the prefix of the family.
    interleaved : bool
        Whether rows are interleaved where the family's table says so.
    """

    def __init__(self, family, config, outside, inside, bare=False, interleaved=True):
        self._family, self._config, self._outside, self._inside = family, config, outside, inside
        self._bare, self._interleaved = bare, interleaved
        self._kinds = config.kinds

    def expected(self):
        """Shape of every stored tensor, by published name."""
        shapes = {self.name(name, None): self._stored_shape(name, None) for name in self._outside}
        for layer, kind in enumerate(self._kinds):
            for name in self._inside[kind]:
                shape = self._stored_shape(name, layer)
                if self._of_experts(name, layer) and not self._entry(name, layer).stacked:
                    shapes |= {self.name(name, layer, expert): shape[1:] for expert in range(shape[0])}
                else:
                    shapes[self.name(name, layer)] = shape
        return shapes

    def name(self, name, layer, expert=None):
        """Published name of the tensor that one of ours is in."""
        stored = self._entry(name, layer).name.replace("{expert}", str(expert))
        if layer is not None:
            stored = f"{self._family.layers}{layer}.{stored}"
        return stored.removeprefix(self._family.prefix) if self._bare else stored

    def ours(self, values, name, layer, expert=None):
        """One of our tensors out of the values stored under its name: a view, but where rows change their order."""
        entry, shapes, first = self._entry(name, layer), self._shapes(layer), self._of_experts(name, layer)
        if entry.stacked:
            values = values[expert]
        if entry.transposed:
            values = values.T
        if entry.fused:
            names = _fused(entry, name)
            place = names.index(name)
            if entry.woven:
                values = np.ascontiguousarray(values[place :: len(names)])  # products would copy such strides each time
            else:
                start = sum([shapes[before][first] for before in names[:place]])
                values = values[start : start + shapes[name][first]]
        if entry.interleaved and self._interleaved:
            block = self._config.head_dim if entry.interleaved == "heads" else len(values)
            rope_dim = self._config.rope_dim
            values = half_split(values, block, block - rope_dim, rope_dim)
        return values

    def _shapes(self, layer):
        return self._outside if layer is None else self._inside[self._kinds[layer]]

    def _of_experts(self, name, layer):
        """Whether there is one of each expert, so that its shape has experts in front."""
        return layer is not None and self._kinds[layer].sparse and name.partition(".")[0] in EXPERT_TENSORS

    def _entry(self, name, layer):
        """`Stored` of one of our tensors; a bias stands beside its matrix unless the family says otherwise."""
        family, (matrix, _, bias) = self._family, name.partition(".")
        table = family.outside if layer is None else family.experts_inside if self._of_experts(name, layer) else family.inside
        entry = table[name if name in table else matrix]
        entry = entry if isinstance(entry, Stored) else Stored(entry)
        return entry if name in table or not bias else entry._replace(name=entry.name.removesuffix("weight") + "bias")

    def _stored_shape(self, name, layer):
        """Shape of the tensor that one of ours is in, experts in front if there is one of each."""
        entry, shapes, first = self._entry(name, layer), self._shapes(layer), self._of_experts(name, layer)
        experts, (n_rows, *d_in) = shapes[name][:first], shapes[name][first:]
        n_rows = sum([shapes[part][first] for part in _fused(entry, name)]) or n_rows
        return (*experts, *((*d_in, n_rows) if entry.transposed else (n_rows, *d_in)))


def _fused(entry, name):
    """Names of the tensors that are stored as one with this: matrices, or their biases."""
    _, dot, bias = name.partition(".")
    return [part + dot + bias for part in entry.fused]


def half_split(rows, block, first, rope_dim):
    """Rows in which the pairs that RoPE turns are half a rotated part apart, from rows that have them side by side.

    Parameters
    ----------
    rows : array (n * block, ...)
        Of a matrix, or of its bias.
    block : int
        Rows of one head.
    first, rope_dim : int
        Which row of a block is its first rotated one, and how many are.
    """
    order = np.arange(block)
    turned = order[first : first + rope_dim].reshape(-1, 2)
    order[first : first + rope_dim] = turned.T.ravel()
    return rows.reshape(-1, block, *rows.shape[1:])[:, order].reshape(rows.shape)
