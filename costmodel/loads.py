"""What a forward, or a whole decode, asks of a model: a handful of sums.

Every count of every operation is linear in these sums, with coefficients that
depend on the model alone.  One forward and a decode of many steps differ in
their load and in nothing else, so that a decode needs no loop over its tokens.

Arguments are whole numbers or integer arrays that broadcast; sums of whole
numbers are Python ints, which do not overflow.
"""

import operator
from functools import lru_cache, wraps
from typing import NamedTuple

import numpy as np

from npinfer.errors import InputError

INT64_MAX = 2**63 - 1
NUMPY = np.ndarray, np.generic


class Symbol:
    """Base of numbers that formulas hand through as they are, see `costmodel.traced`."""


class Attention(NamedTuple):
    """Sums over forwards of what the layers of one window see; B sequences, T new positions, S keys.

    Attributes
    ----------
    keys : sum of B * S, cached rows read
    pairs : sum of B * T * S, (query, key) pairs multiplied
    masked : sum of those pairs that the causal mask or the window throws away
    """

    keys: int
    pairs: int
    masked: int


class Load(NamedTuple):
    """Sums over forwards.

    Attributes
    ----------
    forwards : their number
    tokens : sum of B * T
    head_rows : positions that the head runs for
    embedding_bytes : stored bytes of the embedding rows looked up
    attention : tuple of Attention, one for each (window, n_layers) of `layers_by_window`
    """

    forwards: int
    tokens: int
    head_rows: int
    embedding_bytes: int
    attention: tuple

    def flat(self):
        """All sums in one tuple, those of the windows last."""
        return (*self[:4], *[value for attention in self.attention for value in attention])


@lru_cache(maxsize=256)
def layers_by_window(config):
    """(window, number of layers that have it) for each window of the model, in order of appearance."""
    windows = config.windows
    return tuple([(window, windows.count(window)) for window in dict.fromkeys(windows)])


def forward_load(config, embedding_bytes, batch, n_cached, n_new, all_logits=False):
    """Load of one forward: `n_new` positions of `batch` sequences on top of `n_cached`.

    Parameters
    ----------
    embedding_bytes : callable
        Stored bytes of so many embedding rows.
    """
    attention = []
    for window, _ in layers_by_window(config):
        kept = n_cached if window is None else least(n_cached, window - 1)
        keys = kept + n_new
        masked = n_new * keys - visible_pairs(n_cached, n_new, window)
        attention.append(Attention(batch * keys, batch * n_new * keys, batch * masked))
    tokens = batch * n_new
    return Load(1, tokens, tokens if all_logits else batch, embedding_bytes(tokens), tuple(attention))


def decode_load(config, embedding_bytes, batch, n_prompt, n_steps):
    """Load of `n_steps` decode steps, the i-th (from 1) on n_prompt + i - 1 cached positions."""
    attention = []
    for window, _ in layers_by_window(config):
        # A step has T = 1, so it sees min(W, n_prompt + i) keys and masks none of them.
        keys = batch * visible_pairs(n_prompt, n_steps, window)
        attention.append(Attention(keys, keys, 0))
    tokens = batch * n_steps
    return Load(n_steps, tokens, tokens, n_steps * embedding_bytes(batch), tuple(attention))


def visible_pairs(n_cached, n_new, window=None):
    """Sum over i = 1 ... n_new of min(window, n_cached + i): (query, key) pairs that a mask keeps."""
    if window is None:
        return n_new * n_cached + n_new * (n_new + 1) // 2
    growing = least(n_new, most(window - n_cached, 0))  # queries whose window is not yet full
    return growing * n_cached + growing * (growing + 1) // 2 + (n_new - growing) * window


def refuse_overflow(form):
    """Make a formula raise `OverflowError` where integer arrays would give it results of 2**63 or more.

    For formulas that grow with every argument: worked in Python ints, the
    corner of all maxima decides for whole arrays.
    """

    @wraps(form)
    def checked(*args, **options):
        if not any([isinstance(arg, NUMPY) for arg in (*args, *options.values())]):
            return form(*args, **options)
        if any(map(_is_integers, (*args, *options.values()))):
            corner = form(*map(_maximum, args), **{name: _maximum(option) for name, option in options.items()})
            largest = max(corner) if isinstance(corner, tuple) else corner
            if _plain(largest) and largest > INT64_MAX:
                raise OverflowError(
                    f"{form.__name__} reaches {largest}, which an int64 array does not hold; "
                    "use smaller arguments, or Python ints one by one"
                )
        return form(*map(_wide, args), **{name: _wide(option) for name, option in options.items()})

    return checked


def _is_integers(value):
    return isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "iu" and value.size > 0


def _wide(value):
    if isinstance(value, np.integer) or (isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"):
        return int(value)  # a NumPy scalar would wrap
    return value.astype(np.int64, copy=False) if _is_integers(value) else value


def _maximum(value):
    return int(value.max()) if _is_integers(value) else _wide(value)


def least(a, b):
    """The smaller of each pair, as a Python number where both are."""
    return min(a, b) if _plain(a) and _plain(b) else np.minimum(a, b)


def most(a, b):
    """The larger of each pair, as a Python number where both are."""
    return max(a, b) if _plain(a) and _plain(b) else np.maximum(a, b)


def _plain(value):
    return isinstance(value, int | float)


def whole_numbers(name, value, at_least):
    """`value` as a Python int or an int64 array, all of it `at_least` so much.

    Raises
    ------
    InputError
        If it is not whole, or too small.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype.kind not in "iu":
            raise InputError(f"{name} is an array of {value.dtype}, expected integers")
        smallest = value.min() if value.size else at_least
        if value.size and value.max() > INT64_MAX:
            raise OverflowError(f"{name} goes up to {value.max()}, which an int64 does not hold")
        numbers = value.astype(np.int64, copy=False)
    else:
        try:
            smallest = operator.index(None if isinstance(value, bool) else value)
            numbers = value if isinstance(value, Symbol) else smallest
        except TypeError:
            raise InputError(f"{name} is {value!r}, expected a whole number or an integer array") from None
    if smallest < at_least:
        raise InputError(f"{name} is {smallest}, expected at least {at_least}")
    return numbers
