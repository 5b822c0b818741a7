"""How RoPE is stretched for contexts beyond the trained one, one record a method.

`stretched(theta, dim, length)` gives the inverse frequencies, radians per
position of each pair, float64 (dim / 2,), and `attention_factor` what cosines
and sines are multiplied by.  Names and defaults are those of
github.com/huggingface/transformers, src/transformers/modeling_rope_utils.py.
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi

import numpy as np

from npinfer.checks import flag, positive, settle, whole
from npinfer.errors import ConfigError


def unscaled(theta, dim):
    """Inverse frequencies theta ** (-2 i / dim).

    Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2.
    """
    return float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


class Scaling:
    """What the methods share: a factor, and what messages call them."""

    attention_factor = 1.0
    by_length = False  # whether the angle of a position depends on how long the text is

    def __post_init__(self):
        settle(self, positive, "factor", prefix="rope_scaling ")
        if hasattr(self, "original_max_context"):
            settle(self, whole, "original_max_context", prefix="rope_scaling ")


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by `factor`.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation", arXiv:2306.15595, section 2.3.
    """

    factor: float

    def stretched(self, theta, dim, length):
        return unscaled(theta, dim) / self.factor


@dataclass(frozen=True)
class FactorScaling(Scaling):
    """Each inverse frequency divided by a factor of its own, as a GGUF file stores them (Llama 3.1 and later)."""

    factors: tuple

    def __post_init__(self):
        factors = tuple([positive("rope_scaling factors", factor) for factor in self.factors])
        object.__setattr__(self, "factors", factors)

    def stretched(self, theta, dim, length):
        return unscaled(theta, dim) / np.array(self.factors)


@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """A base that grows with the text once it is longer than `original_max_context`.

    Angles then depend on the length of the text, so that a key computed for a
    shorter one is not the key of a longer one.
    Source: transformers, `_compute_dynamic_ntk_parameters` ("dynamic NTK").
    """

    factor: float
    original_max_context: int
    by_length = True

    def stretched(self, theta, dim, length):
        stretch = self.factor * max(length, self.original_max_context) / self.original_max_context - (self.factor - 1)
        return unscaled(theta * stretch ** (dim / (dim - 2)) if dim > 2 else theta, dim)


@dataclass(frozen=True)
class RopeScaling(Scaling):
    """Llama 3's stretching of RoPE wavelengths.

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
        super().__post_init__()
        settle(self, positive, "low_freq_factor", "high_freq_factor", prefix="rope_scaling ")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling low_freq_factor is {self.low_freq_factor:g}, expected below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )

    def stretched(self, theta, dim, length):
        frequencies = unscaled(theta, dim)
        turns = self.original_max_context * frequencies / (2 * np.pi)  # in the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: fast pairs kept, slow ones stretched, a ramp between, and a factor on the scores.

    Source: Peng et al. 2023, "YaRN", arXiv:2309.00071, section 3; the ramp in numbers of
    pairs, rounded outwards if `truncate`, is that of transformers, `_compute_yarn_parameters`.

    Attributes
    ----------
    factor : float
    original_max_context : int
    attention_factor : float
        Multiplies cosines and sines; default 0.1 ln(factor) + 1.
    beta_fast, beta_slow : float
        Pairs that turn more often than `beta_fast` in the original context
        are kept, those that turn less than `beta_slow` are stretched whole.
    truncate : bool
    """

    factor: float
    original_max_context: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", yarn_attention_factor(self.factor))
        settle(self, positive, "attention_factor", "beta_fast", "beta_slow", prefix="rope_scaling ")
        settle(self, flag, "truncate", prefix="rope_scaling ")
        if self.beta_slow >= self.beta_fast:
            raise ConfigError(f"rope_scaling beta_slow is {self.beta_slow:g}, expected below beta_fast {self.beta_fast:g}")

    def stretched(self, theta, dim, length):
        def pair(n_turns):
            """Which pair turns so often in the original context."""
            return dim * log(self.original_max_context / (n_turns * 2 * pi)) / (2 * log(theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / (last - first or 0.001), 0, 1)
        frequencies = unscaled(theta, dim)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


def yarn_attention_factor(factor, mscale=1.0):
    """0.1 * mscale * ln(factor) + 1, YaRN's temperature of the softmax; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def of_kind(kind="llama3", **settings):
    """The record of a method by its published name: "llama3", "linear", "dynamic", "yarn"."""
    kinds = {"llama3": RopeScaling, "linear": LinearScaling, "dynamic": DynamicScaling, "yarn": YarnScaling}
    return kinds[kind](**settings)
