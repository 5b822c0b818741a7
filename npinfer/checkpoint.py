"""A published checkpoint as a source of weights: names, shapes and formats checked before anything is run.

Names of tensors, and how they are stored, are those of `npinfer.families`.
"""

import os
import re
from dataclasses import replace

from npinfer.errors import CheckpointError
from npinfer.formats import Precision, exceptions_to
from npinfer.gguf_model import read_gguf
from npinfer.hf import read_config
from npinfer.layouts import Layout
from npinfer.safetensors import open_folder
from npinfer.tensors import layer_tensors, model_tensors


class Checkpoint:
    """A checkpoint whose files and config have proved to belong together; made by `read_checkpoint`.

    Attributes
    ----------
    config : ModelConfig
    gain_offset : float
        What gains of norms are more than what is stored of them.
    """

    def __init__(self, folder, published, tensors, layout, expected):
        self.config, self.gain_offset = published.config, published.family.gain_offset
        self._folder, self._tensors, self._layout, self._expected = folder, tensors, layout, expected

    def precision(self, **formats):
        """`Precision` of `formats`; by default weights as they are stored, KV and activations fp32.

        Raises
        ------
        CheckpointError
            If the weight format is not given, and matrices are stored in several.
        """
        weights = formats.get("weights") or self._stored()
        precision = Precision(**{"kv": "fp32", "activations": "fp32", **formats, "weights": weights})
        if formats.get("weights") or formats.get("bits_per_weight"):
            return precision
        return replace(precision, exceptions=exceptions_to(precision.vectors, self._vectors()))

    def _stored(self):
        matrices = [name for name, shape in self._expected.items() if len(shape) > 1 and not name.endswith("bias")]
        formats = {self._tensors.dtype(name) for name in matrices}
        if len(formats) > 1:
            raise CheckpointError(
                f"{self._folder}: matrices are stored in {', '.join(sorted(formats))}; say which format to hold them in "
                "(precision=npinfer.Precision(...), --weights)"
            )
        return formats.pop()

    def _vectors(self):
        """{tensor: {layer: format}} of what is no matrix: published files keep some of it in more bits."""
        stored, config = {}, self.config
        layers = [(None, model_tensors(config)), *enumerate([layer_tensors(config, kind) for kind in config.kinds])]
        for layer, shapes in layers:
            for name, shape in shapes.items():
                if len(shape) == 1 or name.endswith(".bias"):
                    stored.setdefault(name, {})[layer] = self._tensors.dtype(self._layout.name(name, layer))
        return stored

    def source(self, name, layer, shape, expert=None):
        """One tensor, or that of one expert, as a float32 array, for `npinfer.weights.build`."""
        return self._tensors.float32(
            self._layout.name(name, layer, expert), lambda stored: self._layout.ours(stored, name, layer, expert)
        )


def read_checkpoint(folder):
    """Open the `Checkpoint` in `folder`, or a .gguf file; errors as of `Transformer.from_checkpoint`."""
    if os.fspath(folder).endswith(".gguf"):
        return read_gguf(folder)
    published = read_config(folder)
    config, family, tensors = published.config, published.family, open_folder(folder)
    _check_numbers(folder, config, family, len(tensors))
    layout = Layout(
        family,
        config,
        model_tensors(config),
        {kind: layer_tensors(config, kind) for kind in set(config.kinds)},
        bare=not any(name.startswith(family.prefix) for name in tensors.names()),
        interleaved=published.keys.take("rope_interleave", True),
    )
    expected = layout.expected()
    stored = {name for name in tensors.names() if not re.fullmatch(family.ignored, name)}
    stored -= _further_layers(published, stored)
    if config.tie_embeddings:
        stored -= _tied_head(folder, tensors, family, layout)
    _check(folder, tensors, stored, expected)
    return Checkpoint(folder, published, tensors, layout, expected)


def _check_numbers(folder, config, family, n_tensors):
    """Raise `CheckpointError` if the config has more layers or experts than could be stored, before they are listed."""
    n_experts = 0
    if any("{expert}" in str(stored) for stored in family.experts_inside.values()):
        n_experts = config.experts.n_experts * sum([kind.sparse for kind in config.kinds])
    for n, what in ((config.n_layers, "layers"), (n_experts, "experts in all layers")):
        if n > n_tensors:
            raise CheckpointError(
                f"{folder}: config.json has {n} {what} but only {n_tensors} tensors are stored; do they belong together?"
            )


def _further_layers(published, names):
    """Tensors of the layers behind the last that predict more than one token, which are not run; they have an `eh_proj`."""
    first, n_further = published.config.n_layers, published.keys.take("num_nextn_predict_layers") or 0
    prefixes = [f"{published.family.layers}{layer}." for layer in range(first, first + min(n_further, len(names)))]
    further = tuple([prefix for prefix in prefixes if f"{prefix}eh_proj.weight" in names])
    return {name for name in names if name.startswith(further)}


def _tied_head(folder, tensors, family, layout):
    """Name of a tied head that is stored all the same; a different one would be a different model."""
    head, embedding = family.outside["lm_head"], layout.name("embed", None)
    if head not in tensors:
        return set()
    if embedding in tensors and not _same(tensors, head, embedding):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding, but {head} differs from it; "
            "set tie_word_embeddings to false if the head is its own"
        )
    return {head}


def _same(tensors, *names):
    first, second = [tensors.read(name) for name in names]
    return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())


def _check(folder, tensors, stored, expected):
    """Raise `CheckpointError` unless the tensors stored are those expected."""
    if missing := sorted(expected.keys() - stored):
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors of the config are missing, first {missing[0]!r}; "
            "check that config.json and weights belong together and that all shards are there"
        )
    if extra := sorted(stored - expected.keys()):
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors have no place in the config, first {extra[0]!r}; "
            "check config.json (n_layers, biases) against the weights"
        )
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise CheckpointError(
                f"{folder}: {name} is {tensors.shape(name)}, expected {shape} by config.json; do they belong together?"
            )
        tensors.read(name)  # a view: raises if the dtype is not one that can be read
