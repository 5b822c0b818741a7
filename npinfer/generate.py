"""Generation: a prefill gives the first token, decode steps give the rest; greedily, or drawn by a sampler."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from npinfer import ops
from npinfer.checks import whole
from npinfer.errors import InputError
from npinfer.ledger import forward
from npinfer.model import as_tokens
from npinfer.specs import Array, spec


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes
    ----------
    tokens : int array (B, n_output) or None
        Fewer if all sequences met a stop token; None for a shape-only model.
    cache : KVCache
        Holds a new row for each token but the last, which was never forwarded.
    """

    tokens: np.ndarray | None
    cache: object


def generate(model, tokens, n_output, cache=None, on_token=None, sampler=None, stop=False):
    """Prefill the prompt, then decode.

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
    sampler : npinfer.Sampler, optional
        Draws the tokens.  Default greedy: the likeliest.
    stop : bool or token ids, optional
        True ends a sequence at the config's `eos_token_ids`, ids at one of
        these.  It repeats that token while others of the batch go on, and the
        generation ends when all have ended, with fewer than `n_output` tokens.
        By default, and in a shape-only run, there are `n_output` in any case,
        so that counts are known beforehand.

    Returns
    -------
    Generation

    Raises
    ------
    InputError
        If an argument is not as above, or logits are not finite.
    """
    n_output = whole("n_output", n_output)
    tokens = model.checked(tokens)
    choose = ops.sample if sampler is None else sampler.start()
    stop = stop_ids(model.config, stop)
    if cache is None:
        cache = model.new_cache(len(tokens))
    cache.check_room(tokens.shape[1] + n_output - 1)

    with forward("prefill"):
        logits = model.prefill(tokens, cache)
        generated = decode_on(model, logits, cache, n_output, choose, stop, on_token)
    return Generation(generated, cache)


def stop_ids(config, stop):
    """The ids that end a sequence, from what `generate` takes as `stop`."""
    if stop is False or stop is None:
        return ()
    if stop is True:
        if not config.eos_token_ids:
            raise InputError(f"{config.name} says no end-of-text token (eos_token_ids); give ids: stop=[2]")
        return config.eos_token_ids
    return tuple([whole("stop token", token, least=0) for token in np.atleast_1d(as_tokens(stop)).tolist()])


def decode_on(model, logits, cache, n_output, choose=ops.sample, stop=(), on_token=None):
    """Choose a token from a prefill's logits, and decode until there are `n_output`; ids (B, n) or None.

    The choice from the prefill's logits belongs to the prefill: it is recorded
    there if its `forward` is still open.
    """
    generated = []
    ended = False  # or (B,) which sequences have met a stop token
    for step in range(n_output):
        with forward("prefill" if step == 0 else "decode"):
            if step:
                logits = model.decode(generated[-1], cache)
            chosen = _chosen(model, logits, choose)
        if stop and model.numeric:
            if step:
                chosen = np.where(ended, generated[-1], chosen)
            ended = np.isin(chosen, stop)
        generated.append(chosen)
        if on_token is not None:
            on_token(chosen if model.numeric else None)
        if np.all(ended):
            break
    return np.stack(generated, axis=1) if model.numeric else None


def decode_greedily(model, logits, cache, n_output):
    """As `decode_on`: the likeliest tokens, as many as asked for."""
    return decode_on(model, logits, cache, n_output)


def _chosen(model, logits, choose):
    """Ids (B,) that `choose` makes of the logits; any ids will do where there are no logits."""
    if not model.numeric:
        choose(logits)
        return no_tokens(logits.shape[:1])
    if not ((logits < np.inf).all() and (logits > -np.inf).any(axis=1).all()):
        raise InputError("logits are infinite or not numbers (NaN): the weights are damaged, or their format overflows")
    return choose(Array(spec(logits.shape, model.precision.activations), logits)).data


@lru_cache(maxsize=64)
def no_tokens(shape):
    """Token ids for a shape-only run: zeros that take no memory, however long the prompt."""
    return np.broadcast_to(np.int8(0), shape)
