"""Generation: a prefill gives the first token, decode steps give the rest."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from npinfer import ops
from npinfer.checks import whole
from npinfer.ledger import forward
from npinfer.specs import Array, spec


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes
    ----------
    tokens : int array (B, n_output) or None
        None for a shape-only model.
    cache : KVCache
        Holds n_prompt + n_output - 1 new rows: the last token was never forwarded.
    """

    tokens: np.ndarray | None
    cache: object


def generate(model, tokens, n_output, cache=None, on_token=None):
    """Prefill the prompt, then decode greedily.

    Parameters
    ----------
    model : Transformer
    tokens : integers (B, T), or (T,) for one sequence
        The prompt, or what is new of it if `cache` holds its beginning.
    n_output : int
        Tokens to generate for each sequence: one prefill and n_output - 1 decode steps.
    cache : KVCache, optional
        Continued if given.
    on_token : callable, optional
        Called with the (B,) ids of each step as soon as they are known (None
        when shape-only): for progress and timing.

    Returns
    -------
    Generation
    """
    n_output = whole("n_output", n_output)
    tokens = model.checked(tokens)
    if cache is None:
        cache = model.new_cache(len(tokens))
    cache.check_room(tokens.shape[1] + n_output - 1)

    with forward("prefill"):
        logits = model.prefill(tokens, cache)
        generated = decode_greedily(model, logits, cache, n_output, on_token)
    return Generation(generated, cache)


def decode_greedily(model, logits, cache, n_output, on_token=None):
    """Choose a token from a prefill's logits, and decode until there are `n_output`; ids (B, n_output) or None.

    The choice from the prefill's logits belongs to the prefill: it is recorded
    there if its `forward` is still open.
    """
    generated = []
    for step in range(n_output):
        with forward("prefill" if step == 0 else "decode"):
            if step:
                logits = model.decode(generated[-1], cache)
            generated.append(_sampled(model, logits))
        if on_token is not None:
            on_token(generated[-1] if model.numeric else None)
    return np.stack(generated, axis=1) if model.numeric else None


def _sampled(model, logits):
    """Ids (B,) of the most likely tokens; any ids will do where there are no logits."""
    if not model.numeric:
        ops.sample(logits)
        return no_tokens(logits.shape[:1])
    return ops.sample(Array(spec(logits.shape, model.precision.activations), logits)).data


@lru_cache(maxsize=64)
def no_tokens(shape):
    """Token ids for a shape-only run: zeros that take no memory, however long the prompt."""
    return np.broadcast_to(np.int8(0), shape)
