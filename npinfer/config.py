"""The architecture of a model: one immutable record, checked when it is made.

`ModelConfig` speaks this project's words; published `config.json` files are
translated in `npinfer.hf` only.
"""

from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import NamedTuple

from npinfer.checks import MAX_LAYERS, flag, one_of, positive, settle, whole
from npinfer.errors import ConfigError
from npinfer.parts import Experts, Latent
from npinfer.scaling import Scaling, YarnScaling

MLP_ACTS = ("swiglu", "geglu", "gelu", "clamped_swiglu")


class LayerKind(NamedTuple):
    """What a layer may differ in from its neighbours.

    Attributes
    ----------
    window : int or None
        Its sliding window; None: a query sees everything before it.
    sparse : bool
        Whether its MLP is a mixture of experts.
    """

    window: int | None
    sparse: bool


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of a decoder-only transformer.

    Parameters
    ----------
    n_layers, d_model, n_heads, d_ff, vocab_size : int
    n_kv_heads : int, optional
        Heads that K and V have; divides `n_heads`.  Default `n_heads`.
    head_dim : int, optional
        Width of a head.  Default `d_model / n_heads`.
    tie_embeddings : bool
        Whether the head multiplies by the embedding matrix.
    qkv_bias, o_bias, mlp_bias : bool
        Whether those projections add a bias.
    sliding_window : int, optional
        A query sees itself and the `sliding_window - 1` positions before it,
        in the layers that `window_pattern` says, repeated over the layers.
    window_pattern : tuple of bool
    rope_theta : float
    rope_scaling : optional
        A record of `npinfer.scaling`.
    rotary_dim : int, optional
        Leading elements of a head that RoPE rotates, even.  Default all.
    local_rope_theta : float, optional
        Of layers with a window, which are then not scaled.  Default `rope_theta`, scaled.
    learned_positions : bool
        A table of `max_context` positions added to the embedding, and no RoPE.
    norm : {"rms", "layer"}
        "layer" subtracts the mean and has a bias.
    pre_norm, post_norm : bool
        Norms before attention and MLP, and behind them before the residual.
    qk_norm : {None, "head", "full"}
        RMS norm of queries and keys, by head or over the whole projection.
    mlp_act : {"swiglu", "geglu", "gelu", "clamped_swiglu"}
        "gelu" has no gate; the clamped one has `act_limit` and `act_alpha`.
    act_limit, act_alpha : float, optional
    attn_scale : float, optional
        Multiplies scores.  Default `head_dim ** -0.5`.
    attn_softcap, final_softcap : float, optional
        Scores, or logits, become cap * tanh(x / cap).
    attn_sinks : bool
        Whether the softmax of each head has one more, learned element.
    scale_embeddings : bool
        Whether embedding rows are multiplied by sqrt(d_model).
    experts : Experts, optional
    latent : Latent, optional
    norm_eps : float
    max_context : int, optional
        Positions the model was trained for; for information, nothing is
        refused beyond it but where positions are learned.
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
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5
    max_context: int | None = None
    eos_token_ids: tuple = ()
    window_pattern: tuple = (True,)
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    learned_positions: bool = False
    norm: str = "rms"
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str | None = None
    mlp_act: str = "swiglu"
    act_limit: float | None = None
    act_alpha: float | None = None
    attn_scale: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    attn_sinks: bool = False
    scale_embeddings: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    name: str = field(default="custom", compare=False)

    def __post_init__(self):
        settle(self, whole, "n_layers", most=MAX_LAYERS)
        if self.n_kv_heads is None:
            self._set("n_kv_heads", self.n_heads)
        settle(self, whole, "d_model", "n_heads", "d_ff", "vocab_size", "n_kv_heads")
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
        settle(self, whole, "sliding_window", "max_context", "rotary_dim")
        settle(self, flag, *[each.name for each in fields(self) if each.type is bool])
        settle(self, positive, "rope_theta", "norm_eps", "local_rope_theta", "act_limit", "act_alpha")
        settle(self, positive, "attn_scale", "attn_softcap", "final_softcap")
        one_of("norm", self.norm, ("rms", "layer"))
        one_of("qk_norm", self.qk_norm, (None, "head", "full"))
        one_of("mlp_act", self.mlp_act, MLP_ACTS)
        for name, kind, kinds in (
            ("rope_scaling", Scaling, "RopeScaling (or Linear-, Dynamic-, YarnScaling)"),
            ("experts", Experts, "npinfer.Experts"),
            ("latent", Latent, "npinfer.Latent"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}, expected a {kinds} or None")
        if not isinstance(self.eos_token_ids, list | tuple):
            raise ConfigError(f"eos_token_ids is {self.eos_token_ids!r}, expected a tuple of token ids")
        self._set("eos_token_ids", tuple([whole("eos_token_id", token, least=0) for token in self.eos_token_ids]))
        if not isinstance(self.window_pattern, list | tuple) or not self.window_pattern:
            raise ConfigError(f"window_pattern is {self.window_pattern!r}, expected a tuple of true and false")
        self._set("window_pattern", tuple([flag("window_pattern", has) for has in self.window_pattern]))
        self._check_together()

    def __hash__(self):
        # Worked once: memos of closed forms ask for it at every prediction, and there are some forty fields.
        if "_hash" not in self.__dict__:
            self._set("_hash", hash(tuple([getattr(self, each.name) for each in fields(self) if each.compare])))
        return self._hash

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # it holds in this process only

    def _check_together(self):
        """Raise `ConfigError` where fields that are right by themselves contradict each other."""
        if self.rope_dim % 2:
            name = "rotary_dim" if self.rotary_dim else "head_dim"
            raise ConfigError(f"{name} is {self.rope_dim}, expected an even number: RoPE rotates pairs")
        widest = self.head_dim - 1 if self.latent else self.head_dim  # a latent's head has a part without position
        if self.rope_dim > widest:
            raise ConfigError(f"{self.rope_dim} elements of a head are rotated, expected at most {widest} (head_dim {self.head_dim})")
        if self.learned_positions and self.max_context is None:
            raise ConfigError("learned_positions needs max_context: the table has a row for each position")
        if self.latent:
            others = "qk_norm", "qkv_bias", "attn_sinks", "rotary_dim", "learned_positions"
            unfit = [name for name in others if getattr(self, name)] + ["groups"] * (self.n_kv_heads != self.n_heads)
            if unfit:
                raise ConfigError(f"a latent goes with n_kv_heads equal to n_heads, and without {' and '.join(unfit)}")
        if {self.act_limit is not None, self.act_alpha is not None} != {self.mlp_act == "clamped_swiglu"}:
            raise ConfigError("act_limit and act_alpha go with mlp_act 'clamped_swiglu', both")
        if self.experts and self.mlp_act == "gelu":
            raise ConfigError("mlp_act is 'gelu', which has no gate; experts here have one")
        if not (self.pre_norm or self.post_norm):
            raise ConfigError("pre_norm and post_norm are both false; a layer has one of them, or both")
        if self.experts and self.experts.n_shared and self.post_norm:
            raise ConfigError("shared experts do not go with post_norm: they are added to x apart from the chosen ones")
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ConfigError(f"rope_theta is {self.rope_theta:g}, expected above 1: YaRN tells pairs apart by their speed")

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

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    @property
    def gated(self):
        """Whether the MLP multiplies by a gate."""
        return self.mlp_act != "gelu"

    @property
    def rope_dim(self):
        """Elements of a head that RoPE rotates; 0 where positions are learned."""
        if self.learned_positions:
            return 0
        if self.latent:
            return self.latent.rope_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def value_dim(self):
        """Width of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def kv_shape(self):
        """(parts, heads, width) of what one token adds to the cache of one layer: a key and a value, or one latent row."""
        if self.latent:
            return 1, 1, self.latent.kv_rank + self.latent.rope_dim
        return 2, self.n_kv_heads, self.head_dim

    @property
    def kv_pieces(self):
        """(heads, width) of the two arrays that a layer appends: keys and values, or a latent and its rotated part."""
        if self.latent:
            return (1, self.latent.kv_rank), (1, self.latent.rope_dim)
        return ((self.n_kv_heads, self.head_dim),) * 2

    @property
    def windows(self):
        """Sliding window of each layer, None where a layer sees everything before it."""
        pattern = self.window_pattern
        return tuple([self.sliding_window if pattern[layer % len(pattern)] else None for layer in range(self.n_layers)])

    @property
    def kinds(self):
        """`LayerKind` of each layer."""
        dense = range(self.n_layers) if self.experts is None else self.experts.dense_layers
        dense = frozenset(dense)
        return tuple([LayerKind(window, layer not in dense) for layer, window in enumerate(self.windows)])

    def runs(self):
        """Neighbouring layers of the same kind, as (range of layers, `LayerKind`)."""
        start = 0
        for kind, layers in groupby(self.kinds):
            stop = start + len(list(layers))
            yield range(start, stop), kind
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
