"""A published checkpoint as a source of weights: names, shapes and formats checked before anything is run.

Tensor names are those of github.com/huggingface/transformers for the Llama family.
"""

import os
import re

from npinfer.errors import CheckpointError
from npinfer.formats import Precision
from npinfer.gguf_model import read_gguf
from npinfer.hf import config_from_hf
from npinfer.safetensors import open_folder
from npinfer.tensors import layer_tensors, model_tensors

OUTSIDE = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
# Buffers that older checkpoints store; they follow from the config.
IGNORED = re.compile(r".*rotary_emb\.inv_freq")


class Checkpoint:
    """A checkpoint whose files and config have proved to belong together; made by `read_checkpoint`.

    Attributes
    ----------
    config : ModelConfig
    """

    def __init__(self, folder, config, tensors, expected):
        self.config, self._folder, self._tensors, self._expected = config, folder, tensors, expected

    def precision(self, **formats):
        """`Precision` of `formats`; by default weights as they are stored, KV and activations fp32.

        Raises
        ------
        CheckpointError
            If the weight format is not given, and matrices are stored in several.
        """
        return Precision(**{"weights": formats.get("weights") or self._stored(), "kv": "fp32", "activations": "fp32", **formats})

    def _stored(self):
        formats = {self._tensors.dtype(name) for name, shape in self._expected.items() if len(shape) == 2}
        if len(formats) > 1:
            raise CheckpointError(
                f"{self._folder}: matrices are stored in {', '.join(sorted(formats))}; say which format to hold them in "
                "(precision=npinfer.Precision(...), --weights)"
            )
        return formats.pop()

    def source(self, name, layer, shape):
        """One tensor as a float32 array, for `npinfer.weights.build`."""
        return self._tensors.float32(_published(name, layer))


def read_checkpoint(folder):
    """Open the `Checkpoint` in `folder`, or a .gguf file; errors as of `Transformer.from_checkpoint`."""
    if os.fspath(folder).endswith(".gguf"):
        return read_gguf(folder)
    config = config_from_hf(folder)
    tensors = open_folder(folder)
    if config.n_layers > len(tensors):
        raise CheckpointError(
            f"{folder}: config.json has {config.n_layers} layers but only {len(tensors)} tensors are stored; "
            "do they belong together?"
        )
    expected = _expected(config)
    _check(folder, tensors, config, expected)
    return Checkpoint(folder, config, tensors, expected)


def _published(name, layer):
    """Published name of one of our tensors."""
    name, _, bias = name.partition(".")
    kind = bias or "weight"
    return f"{OUTSIDE[name]}.{kind}" if layer is None else f"model.layers.{layer}.{INSIDE[name]}.{kind}"


def _expected(config):
    """Shape of every tensor that a checkpoint of this config holds, by published name."""
    shapes = {_published(name, None): shape for name, shape in model_tensors(config).items()}
    for layer in range(config.n_layers):
        shapes |= {_published(name, layer): shape for name, shape in layer_tensors(config).items()}
    return shapes


def _check(folder, tensors, config, expected):
    """Raise `CheckpointError` unless the tensors stored are those expected."""
    stored = {name for name in tensors.names() if not IGNORED.fullmatch(name)}
    if config.tie_embeddings and "lm_head.weight" in stored:
        # Some checkpoints write the tied matrix twice; a different one would be a different model.
        if not _same(tensors, "lm_head.weight", "model.embed_tokens.weight"):
            raise CheckpointError(
                f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from it; "
                "set tie_word_embeddings to false if the head is its own"
            )
        stored.discard("lm_head.weight")
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


def _same(tensors, *names):
    first, second = [tensors.read(name) for name in names]
    return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
