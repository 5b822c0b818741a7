"""How far the logits of one run are from those of another: what a storage format costs in accuracy."""

from typing import NamedTuple

import numpy as np

from npinfer.errors import ShapeError


class LogitsError(NamedTuple):
    """Difference of logits from a reference, over all positions.

    Attributes
    ----------
    n_positions : int
    rms : float
        Root mean square of the differences.
    relative_rms : float or None
        That over the reference's standard deviation within a position: logits
        mean the same with any constant added; None where all logits of a position are equal.
    largest : float
    same_choice : float
        Share of positions whose largest logit is the same token's.
    divergence_nats : float
        Mean Kullback-Leibler divergence of the softmax from the reference's.
    """

    n_positions: int
    rms: float
    relative_rms: float | None
    largest: float
    same_choice: float
    divergence_nats: float


def logits_error(logits, reference):
    """`LogitsError` of logits from those of a reference run of the same tokens.

    Parameters
    ----------
    logits, reference : float arrays (..., vocab_size)

    Raises
    ------
    ShapeError
        If their shapes differ.
    """
    if np.shape(logits) != np.shape(reference):
        raise ShapeError(f"logits_error: logits are {np.shape(logits)} and reference {np.shape(reference)}, expected the same")
    logits, reference = [np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1]) for x in (logits, reference)]
    difference = logits - reference
    rms, spread = np.sqrt(np.mean(difference**2)), np.sqrt(np.mean(reference.var(axis=-1)))
    expected, found = log_softmax(reference), log_softmax(logits)
    return LogitsError(
        n_positions=len(logits),
        rms=float(rms),
        relative_rms=float(rms / spread) if spread else None,
        largest=float(np.abs(difference).max()),
        same_choice=float(np.mean(logits.argmax(axis=-1) == reference.argmax(axis=-1))),
        divergence_nats=float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=-1))),
    )


def log_softmax(logits):
    """Logarithms of the probabilities that rows of logits stand for."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
