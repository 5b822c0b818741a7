"""Parts that some architectures have and others have not: experts, and attention through a latent."""

from dataclasses import dataclass

from npinfer.checks import flag, one_of, positive, settle, whole
from npinfer.errors import ConfigError

GATES = ("softmax", "topk_softmax", "sigmoid")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of most layers.

    Attributes
    ----------
    n_experts, n_active : int
        Experts of a layer, and how many of them each token uses.
    d_ff : int
        Inner width of one expert.
    n_shared : int
        Experts that every token uses beside them, run as one MLP of width n_shared * d_ff.
    dense_layers : tuple of int
        Layers that have an ordinary MLP instead.
    gate : {"softmax", "topk_softmax", "sigmoid"}
        "softmax" of all scores, the largest chosen; "topk_softmax": the largest
        scores chosen, and the softmax of those; "sigmoid" of each score, chosen
        with a correction bias and by groups (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
    renormalise : bool
        Whether the weights of the chosen are divided by their sum.
    scale : float
        Multiplies the weights of a sigmoid gate.
    n_groups, n_groups_active : int
        Groups that a sigmoid gate's experts form, and how many of them a token may use.
    router_bias : bool
        Whether the router's product has a bias.
    """

    n_experts: int
    n_active: int
    d_ff: int
    n_shared: int = 0
    dense_layers: tuple = ()
    gate: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_active: int = 1
    router_bias: bool = False

    def __post_init__(self):
        settle(self, whole, "n_experts", "n_active", "d_ff", "n_groups", "n_groups_active", prefix="experts ")
        settle(self, whole, "n_shared", prefix="experts ", least=0)
        settle(self, positive, "scale", prefix="experts ")
        settle(self, flag, "renormalise", "router_bias", prefix="experts ")
        one_of("experts gate", self.gate, GATES)
        if not isinstance(self.dense_layers, list | tuple | set | frozenset | range):
            raise ConfigError(f"experts dense_layers is {self.dense_layers!r}, expected a tuple of layer numbers")
        layers = sorted({whole("experts dense_layers", layer, least=0) for layer in self.dense_layers})
        object.__setattr__(self, "dense_layers", tuple(layers))
        if self.n_active > self.n_experts:
            raise ConfigError(f"experts n_active is {self.n_active}, expected at most n_experts {self.n_experts}")
        if self.n_experts % self.n_groups or self.n_groups_active > self.n_groups:
            raise ConfigError(
                f"experts n_groups is {self.n_groups} and n_groups_active {self.n_groups_active}, expected a divisor of "
                f"n_experts {self.n_experts} and at most as many"
            )
        if self.n_groups > 1 and self.n_experts < 2 * self.n_groups:
            raise ConfigError(f"experts n_groups is {self.n_groups}, expected at least 2 of the {self.n_experts} experts in each")
        if self.n_active > self.n_experts // self.n_groups * self.n_groups_active:
            raise ConfigError(
                f"experts n_active is {self.n_active}, more than {self.n_groups_active} groups of "
                f"{self.n_experts // self.n_groups} have"
            )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the cache holds one compressed row for each token and layer.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.

    Attributes
    ----------
    kv_rank : int
        Width of the latent that keys and values are expanded from.
    rope_dim : int
        Width of the part of a head that is rotated; its key is one for all heads.
    value_dim : int
        Width of a value head.
    q_rank : int or None
        Width of the queries' latent; None: queries are projected directly.
    """

    kv_rank: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None

    norm_eps = 1e-6  # of the latents' norms, whatever that of the layers is

    def __post_init__(self):
        settle(self, whole, "kv_rank", "rope_dim", "value_dim", "q_rank", prefix="latent ")
        if self.rope_dim % 2:
            raise ConfigError(f"latent rope_dim is {self.rope_dim}, expected an even number: RoPE rotates pairs")
