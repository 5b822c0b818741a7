"""Generation without a KV cache: each token is chosen by a forward over the whole history (the textbook's section 2.2).

`generate_without_cache` runs it, `recompute_needed_flops` is its closed form.
"""

import numpy as np

from costmodel import operations
from costmodel.loads import recompute_load
from costmodel.search import first_where
from npinfer import Precision, generate
from npinfer.checks import whole
from npinfer.generate import no_tokens


def generate_without_cache(model, tokens, n_output):
    """Generate greedily and keep nothing from one token to the next.

    Parameters
    ----------
    model : npinfer.Transformer
    tokens : integers (B, T), or (T,) for one sequence
    n_output : int

    Returns
    -------
    int array (B, n_output) or None
        None for a shape-only model.

    Notes
    -----
    A ledger sees n_output prefills.  Each writes K and V of the whole history,
    reads them, and drops them.
    """
    history = model.checked(tokens)
    batch, n_prompt = history.shape
    for n_known in range(1, whole("n_output", n_output) + 1):
        new = generate(model, history, 1).tokens
        history = no_tokens((batch, n_prompt + n_known)) if new is None else np.concatenate([history, new], axis=1)
    return history[:, n_prompt:] if model.numeric else None


def recompute_needed_flops(config, n_prompt, n_output, batch=1):
    """Needed matrix FLOPs of `generate_without_cache`: forwards over n_prompt ... n_prompt + n_output - 1 tokens.

    Linear layers grow with the square of n_output, attention with its cube.
    A closed sum, no loop over the forwards.
    """
    n_prompt, n_output, batch = whole("n_prompt", n_prompt), whole("n_output", n_output), whole("batch", batch)
    load = recompute_load(config, batch, n_prompt, n_output)
    return operations.total_counts(config, Precision(), load).needed_flops


def recompute_doubling_ratio(config, n_prompt, n_output):
    """How many times the FLOPs of n_output tokens without a cache those of 2 * n_output are: 2 if linear, 4 if quadratic."""
    once, twice = [recompute_needed_flops(config, n_prompt, n) for n in (n_output, 2 * n_output)]
    return twice / once


def recompute_quadratic_n_output(config, n_prompt, ratio=3):
    """Output tokens from which twice as many take `ratio` times the FLOPs without a cache.

    The default lies half way between a linear growth (2) and a quadratic one (4).
    None if there is no such number up to 2**24.
    """
    return first_where(lambda n_output: recompute_doubling_ratio(config, n_prompt, n_output) >= ratio)
