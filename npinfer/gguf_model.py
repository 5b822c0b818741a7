"""A GGUF file of the llama architecture as a config and a source of weights.

Metadata keys and tensor names are those of the GGUF specification,
github.com/ggml-org/ggml, docs/gguf.md; a key that is not known here and may
change the result is refused by name.
"""

from collections import Counter
from dataclasses import replace

from npinfer.config import ModelConfig
from npinfer.errors import CheckpointError, ConfigError
from npinfer.formats import Precision, exceptions_to
from npinfer.gguf_file import open_gguf
from npinfer.layouts import half_split
from npinfer.scaling import FactorScaling, LinearScaling
from npinfer.tensors import layer_tensors, model_tensors

# Metadata key behind "llama." -> field of ModelConfig; those that must be there, and those that may be.
SIZES = {
    "block_count": "n_layers",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "attention.head_count": "n_heads",
    "attention.layer_norm_rms_epsilon": "norm_eps",
}
OPTIONS = {
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_context",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
}
CHECKED = ("vocab_size", "attention.value_length", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
NO_EFFECT = ("rope.scaling.finetuned", "rope.scaling.original_context_length")  # of linear scaling or none
ENDS = tuple([f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")])  # of a text, a turn, a message

OUTSIDE = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "attn_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
BIASES = {"qkv_bias": "attn_q.bias", "o_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"}
FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """A model in a GGUF file, with what `npinfer.checkpoint.Checkpoint` has; made by `read_gguf`.

    Attributes
    ----------
    config : ModelConfig
    gain_offset : float
    """

    gain_offset = 0.0

    def __init__(self, file, config):
        self.config, self._file = config, file

    def precision(self, **formats):
        """`Precision` of `formats`; by default every tensor in the type it is stored in, KV and activations fp32.

        `weights` is then the commonest type of matrices, and `exceptions` has the others.
        """
        others = {"kv": "fp32", "activations": "fp32", **formats}
        if formats.get("weights") is None and formats.get("bits_per_weight") is None:
            others |= _stored_formats(self._file, self.config)
        return Precision(**others)

    def source(self, name, layer, shape, expert=None):
        """One tensor as a float32 array, for `npinfer.weights.build`.

        These files order the rotated rows of a head for RoPE that turns neighbours.
        """
        values = self._file.float32(_published(name, layer))
        if name.partition(".")[0] in ("q_proj", "k_proj"):
            return half_split(values, self.config.head_dim, 0, self.config.rope_dim)
        return values


def _stored_formats(file, config):
    """`weights` and `exceptions` of the `Precision` that says how every tensor is stored."""
    matrices, vectors = {}, {}
    for published, (name, layer, shape) in _expected(config).items():
        tensors = matrices if len(shape) == 2 else vectors
        tensors.setdefault(name, {})[layer] = file.format(published)
    weights = Counter([format_ for formats in matrices.values() for format_ in formats.values()]).most_common(1)[0][0]
    plain = Precision(weights=weights)
    return {"weights": weights, "exceptions": exceptions_to(plain.matrices, matrices) + exceptions_to(plain.vectors, vectors)}


def _published(name, layer):
    """Name in the file of one of our tensors."""
    name, _, bias = name.partition(".")
    stem = OUTSIDE[name] if layer is None else f"blk.{layer}.{INSIDE[name]}"
    return f"{stem}.{bias or 'weight'}"


def _expected(config):
    """(our name, layer, shape) of every tensor that a file of this config holds, by its name there."""
    tensors = {_published(name, None): (name, None, shape) for name, shape in model_tensors(config).items()}
    for layer, kind in enumerate(config.kinds):
        for name, shape in layer_tensors(config, kind).items():
            tensors[_published(name, layer)] = name, layer, shape
    return tensors


def read_gguf(path):
    """Open the model in a GGUF file.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    GgufCheckpoint

    Raises
    ------
    CheckpointError
        If the file is damaged, its tensors are not those of its metadata, or
        one is of a type that is not read.
    ConfigError
        If it is of another architecture, or has a setting that this package does not run.
    InputError
        If the gguf package is missing.
    """
    file = open_gguf(path)
    try:
        config = _config(file)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    names = set(file.names()) - {FACTORS}
    if config.n_layers > len(names):
        raise _fault(file, f"{config.n_layers} layers but only {len(names)} tensors")
    expected = _expected(config)
    for differing, what in ((expected.keys() - names, "missing"), (names - expected.keys(), "not of a llama model")):
        if differing:
            raise _fault(file, f"{len(differing)} tensors are {what}, first {min(differing)!r:.120}")
    for name, (*_, shape) in expected.items():
        if file.shape(name) != shape:
            raise _fault(file, f"{name} is {file.shape(name)}, expected {shape} by the metadata")
    return GgufCheckpoint(file, config)


def _config(file):
    """The `ModelConfig` that metadata and names of tensors describe."""
    metadata = file.metadata
    if metadata.get("split.count", 1) != 1:
        raise ConfigError(f"is one of {metadata['split.count']!r:.60} parts of a model; merge them into one file first")
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"general.architecture is {architecture!r:.60}, which is not supported; supported: 'llama'")
    keys = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    for key, value in keys.items():
        if value and key not in (*SIZES, *OPTIONS, *CHECKED, *NO_EFFECT):
            raise ConfigError(
                f"the key {'llama.' + key!r:.80} ({value!r:.60}) is not one this package runs, and it may change the result"
            )
    if missing := [key for key in SIZES if key not in keys]:
        raise ConfigError(f"the key 'llama.{missing[0]}' is missing")
    ends = [metadata[key] for key in ENDS if key in metadata]
    config = ModelConfig(
        **{name: keys[key] for key, name in {**SIZES, **OPTIONS}.items() if key in keys},
        **{name: f"blk.0.{tensor}" in file for name, tensor in BIASES.items()},
        vocab_size=_vocab_size(file, keys),
        tie_embeddings="output.weight" not in file,
        rope_scaling=_scaling(file, keys),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        name=str(metadata.get("general.name", "gguf")),
    )
    value_dim = keys.get("attention.value_length", config.head_dim)
    if value_dim != config.head_dim:
        raise ConfigError(f"attention.value_length is {value_dim!r:.60}, expected that of keys, {config.head_dim}")
    return replace(config, rotary_dim=None) if config.rotary_dim == config.head_dim else config


def _vocab_size(file, keys):
    """Rows of the embedding, which every other number that the file gives must equal."""
    if "token_embd.weight" not in file:
        raise _fault(file, "the tensor token_embd.weight is missing")
    n_rows = file.shape("token_embd.weight")[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens", range(n_rows))
    n_tokens = len(tokens) if isinstance(tokens, list | range) else tokens
    for what, n in (("llama.vocab_size is", keys.get("vocab_size", n_rows)), ("tokens of the tokenizer are", n_tokens)):
        if n != n_rows:
            raise _fault(file, f"{what} {n!r:.60}, but the embedding has {n_rows} rows")
    return n_rows


def _scaling(file, keys):
    """The record of how RoPE is stretched, or None."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ConfigError(f"rope.scaling.type is {kind!r:.60}, which is not supported; supported: none, linear")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    scaling = None if kind == "none" or factor == 1.0 else LinearScaling(factor)
    if FACTORS not in file:
        return scaling
    if scaling is not None:
        raise ConfigError(f"RoPE is scaled by {FACTORS} and by rope.scaling.factor; expected one of them")
    return FactorScaling(tuple(file.float32(FACTORS).ravel().tolist()))


def _fault(file, what):
    return CheckpointError(f"{file.path}: {what}; convert the model anew, or download the file again")
