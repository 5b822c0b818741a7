"""The architecture of a model: one immutable record, checked when it is made.

`ModelConfig` speaks this project's words; published `config.json` files are
translated in `npinfer.hf` only.  `preset` reads the shapes of known models
from presets.toml.
"""

import operator
import os
from dataclasses import dataclass, field, replace
from itertools import groupby

from npinfer.errors import ConfigError
from npinfer.tables import read_table, table_names

PRESETS = os.path.join(os.path.dirname(__file__), "presets.toml")
MAX_SIZE = 2**31  # a dimension beyond this is a typing error, not a model
MAX_LAYERS = 2**16  # layers are Python objects: a hundred times the deepest model published


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of RoPE wavelengths for contexts beyond the trained one.

    Source: Llama 3.1 model release, `rope_scaling` of type "llama3" in its config.json.

    Attributes
    ----------
    factor : float
        Long wavelengths are stretched by this.
    low_freq_factor, high_freq_factor : float
        Wavelengths above `original_max_context` / low are stretched whole,
        below `original_max_context` / high not at all, between in proportion.
    original_max_context : int
        Context length, in tokens, of the original training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int

    def __post_init__(self):
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            object.__setattr__(self, name, _number(f"rope_scaling {name}", getattr(self, name)))
        context = whole("rope_scaling original_max_context", self.original_max_context)
        object.__setattr__(self, "original_max_context", context)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling low_freq_factor is {self.low_freq_factor:g}, expected below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of a decoder-only transformer of the Llama family.

    Parameters
    ----------
    n_layers, d_model, n_heads, d_ff, vocab_size : int
    n_kv_heads : int, optional
        Heads that K and V have; divides `n_heads`.  Default `n_heads`.
    head_dim : int, optional
        Width of a head, even (RoPE turns pairs).  Default `d_model / n_heads`.
    tie_embeddings : bool
        Whether the head multiplies by the embedding matrix.
    qkv_bias, o_bias, mlp_bias : bool
        Whether those projections add a bias.
    sliding_window : int, optional
        A query sees itself and the `sliding_window - 1` positions before it.
    rope_theta : float
    rope_scaling : RopeScaling, optional
    norm_eps : float
    max_context : int, optional
        Positions the model was trained for; for information, nothing is refused beyond it.
    eos_token_ids : tuple of int
    name : str
        Not part of equality.

    Raises
    ------
    ConfigError
        If a size is not a whole number from 1 to 2**31 (n_layers: 2**16), or sizes contradict each other.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    vocab_size: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_context: int | None = None
    eos_token_ids: tuple = ()
    name: str = field(default="custom", compare=False)

    def __post_init__(self):
        self._set("n_layers", whole("n_layers", self.n_layers, most=MAX_LAYERS))
        for size in ("d_model", "n_heads", "d_ff", "vocab_size"):
            self._set(size, whole(size, getattr(self, size)))
        self._set("n_kv_heads", whole("n_kv_heads", self.n_heads if self.n_kv_heads is None else self.n_kv_heads))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads is {self.n_heads}, expected a multiple of n_kv_heads {self.n_kv_heads}: "
                "every KV head serves the same number of query heads (--kv-heads)"
            )
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}; give head_dim (--head-dim)"
            )
        self._set("head_dim", whole("head_dim", self.d_model // self.n_heads if self.head_dim is None else self.head_dim))
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, expected an even number: RoPE rotates pairs")
        for size in ("sliding_window", "max_context"):
            if getattr(self, size) is not None:
                self._set(size, whole(size, getattr(self, size)))
        for flag in ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"{flag} is {getattr(self, flag)!r}, expected true or false")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ConfigError(f"rope_scaling is {self.rope_scaling!r}, expected a RopeScaling or None")
        if not isinstance(self.eos_token_ids, list | tuple):
            raise ConfigError(f"eos_token_ids is {self.eos_token_ids!r}, expected a tuple of token ids")
        self._set("eos_token_ids", tuple([whole("eos_token_id", token, least=0) for token in self.eos_token_ids]))
        self._set("rope_theta", _number("rope_theta", self.rope_theta))
        self._set("norm_eps", _number("norm_eps", self.norm_eps))

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    @classmethod
    def from_hf(cls, source):
        """The config of a published model.

        Parameters
        ----------
        source : path or dict
            A config.json, the folder that holds it, or its parsed content.

        Raises
        ------
        ConfigError
            If it cannot be read, or describes a model that this package does not run.
        """
        from npinfer.hf import config_from_hf

        return config_from_hf(source)

    @property
    def windows(self):
        """Sliding window of each layer, None where a layer sees everything before it."""
        return (self.sliding_window,) * self.n_layers

    def runs(self):
        """Neighbouring layers of the same shape, as (range of layers, window)."""
        start = 0
        for window, layers in groupby(self.windows):
            stop = start + len(list(layers))
            yield range(start, stop), window
            start = stop

    def resized(self, **sizes):
        """A copy with other dimensions, as the command line's overrides mean them.

        `d_ff` keeps its ratio when only `d_model` changes, and `head_dim` is
        `d_model / n_heads` when either changes and it is not given; both are
        errors where the result is not whole.
        """
        changed = [f"{size}={whole(size, value)}" for size, value in sizes.items() if value != getattr(self, size)]
        name = " ".join([self.name, *changed])
        if "d_model" in sizes and "d_ff" not in sizes:
            d_ff, rest = divmod(self.d_ff * sizes["d_model"], self.d_model)
            if rest:
                raise ConfigError(
                    f"d_ff keeps its ratio {self.d_ff}/{self.d_model} to d_model, which is not whole at "
                    f"d_model {sizes['d_model']}; give d_ff (--d-ff)"
                )
            sizes["d_ff"] = d_ff
        if {"d_model", "n_heads"} & sizes.keys() and "head_dim" not in sizes:
            sizes["head_dim"] = None
        return replace(self, **sizes, name=name)


def whole(name, value, least=1, most=MAX_SIZE):
    """`value` as an int from `least` to `most`, or a `ConfigError` that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    if not least <= number <= most:
        limit = f"2**{most.bit_length() - 1}" if most in (MAX_SIZE, MAX_LAYERS) else most
        raise ConfigError(f"{name} is {number}, expected from {least} to {limit}")
    return number


def _number(name, value):
    """`value` as a float if it is a positive finite number, or a `ConfigError` that names it."""
    try:
        number = 0.0 if isinstance(value, bool | str) else float(value)  # a NumPy scalar would widen what it meets
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name} is {value!r:.40}, expected a positive number")
    return number


def presets():
    """Names of the models that `preset` knows."""
    return table_names(PRESETS)


def preset(name):
    """The `ModelConfig` of a known model.

    Raises
    ------
    UnknownName
        If there is none of that name; the message lists those there are.
    """
    table = read_table(PRESETS, name, "model")
    del table["source"]
    table.pop("note", None)
    if "rope_scaling" in table:
        table["rope_scaling"] = RopeScaling(**table["rope_scaling"])
    return ModelConfig(name=name, **table)
