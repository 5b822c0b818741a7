"""How the next token is chosen from the logits where it is not simply the likeliest.

`Sampler` draws from the softmax of the logits, sharpened or flattened by a
temperature, and cut to the most likely tokens.  What it computes is counted as
the operation `sample`, as the greedy choice of `npinfer.ops.sample` is.
"""

from dataclasses import dataclass

import numpy as np

from npinfer.checks import positive, whole
from npinfer.errors import ConfigError, InputError
from npinfer.ledger import cost
from npinfer.operation import operation
from npinfer.specs import Array, spec


def _draw_rule(logits, uniform, temperature, top_k, top_p):
    batch, vocab_size = logits.shape
    n_kept = vocab_size if top_k is None else min(top_k, vocab_size)
    # Subtract, divide, exp of each; their running sums (one less); top_p and the draw times a sum.
    flops = batch * (4 * n_kept + 1)
    return spec((batch,), None, "token"), (("sample", cost(reads=[logits], elementwise_flops=flops)),)


@operation(_draw_rule)
def draw(logits, uniform, *, temperature, top_k, top_p):
    """A token of each row, drawn from the likeliest: (B, vocab_size), (B,) -> (B,) ids.

    `uniform` are numbers in [0, 1), one for each row.  Of the `top_k` largest
    logits, those are kept that the softmax of these k gives `top_p` in sum, the
    last one included, and one of them is drawn in proportion.  Sorting and
    selecting are not counted.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration", arXiv:1904.09751, section 3.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]  # of equal ones the lower id first
    largest = np.take_along_axis(logits, order, axis=1)
    with np.errstate(over="ignore"):  # a small temperature may divide to -inf, whose exp is 0
        weights = np.exp((largest - largest[:, :1]) / np.float32(temperature))
    sums = np.add.accumulate(weights, axis=1)
    last = (sums < sums[:, -1:] * np.float32(top_p)).sum(axis=1)[:, None]
    drawn = (sums <= np.take_along_axis(sums, last, axis=1) * uniform[:, None]).sum(axis=1)[:, None]
    return np.take_along_axis(order, np.minimum(drawn, last), axis=1)[:, 0]


@dataclass(frozen=True)
class Sampler:
    """Draws tokens at random, the same ones in each `generate` for the same seed.

    Parameters
    ----------
    temperature : float
        Divides the logits; above 1 evens the probabilities out.
    top_k : int, optional
        Only the k likeliest tokens.
    top_p : float
        Only the likeliest tokens that have this probability in sum, the last one included.
    seed : int

    Raises
    ------
    InputError
        If the temperature is not a positive number (greedy is no sampler at
        all), `top_k` no whole number of 1 or more, or `top_p` not in (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        try:
            with np.errstate(over="ignore"):
                positive("temperature", float(np.float32(positive("temperature", self.temperature))))  # it is used as float32
        except ConfigError as error:
            raise InputError(f"{error}; for the likeliest token give no sampler at all") from None
        if positive("top_p", self.top_p) > 1:
            raise InputError(f"top_p is {self.top_p}, expected a probability above 0 and at most 1")
        if self.top_k is not None:
            whole("top_k", self.top_k)
        whole("seed", self.seed, least=0, most=2**64)

    def start(self):
        """A function from logits to ids for one generation, with a random generator of its own."""
        rng = np.random.default_rng(self.seed)
        chosen = {"temperature": float(self.temperature), "top_k": self.top_k, "top_p": float(self.top_p)}

        def choose(logits):
            shape = logits.shape[:1]
            uniform = None if logits.data is None else rng.random(shape, dtype=np.float32)
            return draw(logits, Array(spec(shape, None, "constant"), uniform), **chosen)

        return choose
