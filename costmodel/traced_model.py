"""A model whose sizes are traced, layer by layer: what `costmodel.explain` hands to the closed forms.

Every closed form is a sum over layers.  So it is worked on a model of no layer
and on one of a single layer, for each kind of layer that there is; the
difference is what such a layer adds, and is multiplied by how many there are.
"""

from collections import Counter
from copy import copy
from dataclasses import fields, replace
from typing import NamedTuple

from costmodel.traced import Traced
from npinfer import Experts, Latent, ModelConfig, Precision


class Kind(NamedTuple):
    """Layers that are counted alike.

    Attributes
    ----------
    suffix : str
        Of their names, such as "_sparse"; "" if all layers are of one kind.
    n_layers : Traced
    config : ModelConfig
        Of a single layer of this kind; traced.
    precision : Precision
    """

    suffix: str
    n_layers: Traced
    config: ModelConfig
    precision: Precision


class Parts(NamedTuple):
    """A number of a model: what lies outside the layers, and of one layer of each kind."""

    outside: object
    each: list

    def __sub__(self, other):
        return Parts(self.outside - other.outside, [mine - theirs for mine, theirs in zip(self.each, other.each)])


class TracedModel:
    """A model's sizes under their own names.

    Attributes
    ----------
    config : ModelConfig
        Whole numbers traced; its number of layers is `n_layers`, whatever their kinds.
    precision : Precision
    kinds : list of Kind
    none : ModelConfig
        Of no layer.
    """

    def __init__(self, config, precision):
        layers = [
            (kind.window is not None, kind.sparse, precision.exceptions_of(layer)) for layer, kind in enumerate(config.kinds)
        ]
        numbers = Counter(layers)
        differ = [len(set(values)) > 1 for values in zip(*numbers)]
        formats = list(dict.fromkeys([exceptions for *_, exceptions in numbers]))
        suffixes = {}
        for kind in numbers:
            windowed, sparse, exceptions = kind
            words = ("full", "windowed")[windowed], ("dense", "sparse")[sparse], f"formats_{formats.index(exceptions) + 1}"
            suffixes[kind] = "".join([f"_{word}" for word, names in zip(words, differ) if names])
        # Numbers of layers stand first in products.
        named = {kind: Traced.named(f"n_layers{suffixes[kind]}", number) for kind, number in numbers.items()}
        self.config, self.precision = _traced(config), precision
        if len(named) == 1:
            named = {kind: self.config.n_layers for kind in named}
        self.kinds = []
        for kind, n_layers in named.items():
            windowed, sparse, exceptions = kind
            everywhere = [each for each in precision.exceptions if each[1] is None]
            here = [(tensor, 0, format_) for tensor, format_ in exceptions]
            one = self._of_layers(1, windowed, sparse), replace(precision, exceptions=(*everywhere, *here))
            self.kinds.append(Kind(suffixes[kind], n_layers, *one))
        self.none = self._of_layers(0, False, False)

    def _of_layers(self, n_layers, windowed, sparse):
        experts = _changed(self.config.experts, dense_layers=()) if sparse else None
        return _changed(self.config, n_layers=n_layers, window_pattern=(windowed,), experts=experts)

    def parts(self, form):
        """What lies outside the layers, and what one layer of each kind adds.

        Parameters
        ----------
        form : callable
            Of a config and a precision; gives numbers that can be subtracted.
        """
        outside = form(self.none, self.precision)
        return Parts(outside, [form(kind.config, kind.precision) - outside for kind in self.kinds])

    def whole(self, parts):
        """What all layers and the rest come to."""
        each = [Traced.of(one) for one in parts.each]
        if len({one.text() for one in each}) == 1:
            return parts.outside + self.config.n_layers * each[0]
        return sum([kind.n_layers * one for kind, one in zip(self.kinds, each)], parts.outside)


def _traced(record):
    """A copy whose whole numbers are traced under their names, those of its parts too."""
    numbers = {}
    for field in fields(record):
        value, name = getattr(record, field.name), field.name
        if isinstance(record, Experts) and name == "d_ff":
            name = "expert_d_ff"  # beside that of dense layers
        if type(value) is int and value:  # 0 is none
            numbers[field.name] = Traced.named(name, value)
        elif isinstance(value, Experts | Latent):
            numbers[field.name] = _traced(value)
    return _changed(record, **numbers)


def _changed(record, **values):
    """A copy of a frozen record with other values, unchecked: it was checked when it was made."""
    changed = copy(record)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed
