"""What a forward, or a whole decode, asks of a model: a handful of sums.

Every count of every operation is linear in these sums, with coefficients that
depend on the model alone.  One forward and a decode of many steps differ in
their load and in nothing else, so that a decode needs no loop over its tokens.
What is not linear in tokens (embedding rows, rounded up to whole bytes, and
experts) is a sum of its own.

Arguments are whole numbers or integer arrays that broadcast; sums of whole
numbers are Python ints, which do not overflow.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodel import experts
from costmodel.arguments import least, most
from costmodel.storage import embedding_bytes


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
    positions : sum of T, which the sequences of a batch share
    head_rows : positions that the head runs for
    embedding_bytes : stored bytes of the embedding rows looked up
    attention : tuple of Attention, one for each (window, layers) of `layers_by_window`
    experts : tuple of Touched, one for each projection that experts have
    """

    forwards: int
    tokens: int
    positions: int
    head_rows: int
    embedding_bytes: int
    attention: tuple
    experts: tuple

    def flat(self):
        """All sums in one tuple, those of the windows and of the experts last."""
        return (*self[:5], *[value for sums in (*self.attention, *self.experts) for value in sums])

    @classmethod
    def ones(cls, config):
        """Loads of this model, in each of which one sum is 1 and the others are 0, in the order of `flat`."""
        n_windows, n_projections = len(layers_by_window(config)), len(experts.projections(config))
        stop = 5 + 3 * n_windows
        for one in np.eye(stop + 2 * n_projections, dtype=int).tolist():
            attention = [Attention(*one[at : at + 3]) for at in range(5, stop, 3)]
            touched = [experts.Touched(*one[at : at + 2]) for at in range(stop, len(one), 2)]
            yield cls(*one[:5], tuple(attention), tuple(touched))


@lru_cache(maxsize=256)
def layers_by_window(config):
    """(window, layers that have it) for each window of the model, in order of appearance."""
    windows = config.windows
    layers = {window: [] for window in windows}
    for layer, window in enumerate(windows):
        layers[window].append(layer)
    return [(window, tuple(those)) for window, those in layers.items()]


def forward_load(config, precision, batch, n_cached, n_new, all_logits=False, experts_touched="expected"):
    """Load of one forward: `n_new` positions of `batch` sequences on top of `n_cached`."""
    attention = []
    for window, _ in layers_by_window(config):
        kept = n_cached if window is None else least(n_cached, window - 1)
        keys = kept + n_new
        masked = n_new * keys - visible_pairs(n_cached, n_new, window)
        attention.append(Attention(batch * keys, batch * n_new * keys, batch * masked))
    tokens = batch * n_new
    rows = embedding_bytes(config, precision, tokens)
    touched = experts.touched(config, precision, tokens, experts_touched)
    return Load(1, tokens, n_new, tokens if all_logits else batch, rows, tuple(attention), touched)


def decode_load(config, precision, batch, n_prompt, n_steps, experts_touched="expected"):
    """Load of `n_steps` decode steps, the i-th (from 1) on n_prompt + i - 1 cached positions."""
    attention = []
    for window, _ in layers_by_window(config):
        # A step has T = 1, so it sees min(W, n_prompt + i) keys and masks none of them.
        keys = batch * visible_pairs(n_prompt, n_steps, window)
        attention.append(Attention(keys, keys, 0))
    tokens = batch * n_steps
    rows = n_steps * embedding_bytes(config, precision, batch)
    touched = [
        experts.Touched(n_steps * nbytes, n_steps * widened)
        for nbytes, widened in experts.touched(config, precision, batch, experts_touched)
    ]
    return Load(n_steps, tokens, n_steps, tokens, rows, tuple(attention), tuple(touched))


def recompute_load(config, batch, n_prompt, n_forwards):
    """Load of prefills over n_prompt, n_prompt + 1, ... positions that nothing is cached for: products alone.

    Which bytes are read of the embedding and of experts is not in it, since
    they are rounded in each forward.
    """
    before, last = n_prompt - 1, n_prompt + n_forwards - 1
    positions, squares = [of(last) - of(before) for of in (_sum, _sum_of_squares)]
    attention = []
    for window, _ in layers_by_window(config):
        kept = _visible_sum(last, window) - _visible_sum(before, window)
        attention.append(Attention(batch * positions, batch * squares, batch * (squares - kept)))
    touched = tuple([experts.Touched(0, 0) for _ in experts.projections(config)])
    return Load(n_forwards, batch * positions, positions, batch * n_forwards, 0, tuple(attention), touched)


def _sum(n):
    return n * (n + 1) // 2


def _sum_of_squares(n):
    return n * (n + 1) * (2 * n + 1) // 6


def _visible_sum(longest, window):
    """Sum over T = 1 ... longest of the pairs that a mask keeps of T x T: 1 + 2 + ... T, no addend above the window."""
    full = longest if window is None else min(longest, window)
    more = longest - full  # forwards longer than the window
    pairs = full * (full + 1) * (full + 2) // 6
    return pairs + (more * _sum(window) + window * _sum(more) if more else 0)


def visible_pairs(n_cached, n_new, window=None):
    """Sum over i = 1 ... n_new of min(window, n_cached + i): (query, key) pairs that a mask keeps."""
    if window is None:
        return n_new * n_cached + n_new * (n_new + 1) // 2
    growing = least(n_new, most(window - n_cached, 0))  # queries whose window is not yet full
    return growing * n_cached + growing * (growing + 1) // 2 + (n_new - growing) * window
