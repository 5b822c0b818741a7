"""Reuse of stored KV at another position: segments of a prompt that were seen elsewhere.

A value row does not know its position.  A key row does: it was rotated by it,
and rotating on by the difference moves it.  In the first layer that gives what
the new history would have computed; above it rows also depend on everything
before them, so that reuse is an approximation (Gim et al. 2024, "Prompt Cache",
arXiv:2311.04934; its repair by computing some tokens afresh: Yao et al. 2024,
"CacheBlend", arXiv:2405.16444).

It takes rotary positions whose angles depend on the position alone, and keys that
are cached as they are; `check_movable` refuses other models by name.
"""

from typing import NamedTuple

import numpy as np

from npinfer import ops
from npinfer.errors import InputError
from npinfer.formats import unheld
from npinfer.ledger import Counts, record
from npinfer.specs import Array, spec


def check_movable(config):
    """Raise `InputError` unless stored keys of this model can be moved to another position."""
    if config.learned_positions:
        why = "its positions are learned and lie in every row"
    elif config.latent is not None:
        why = "it caches a latent, which keys are expanded from"
    elif config.rope_scaling is not None and config.rope_scaling.by_length:
        why = "the angles of its positions depend on how long the text is"
    else:
        return
    raise InputError(f"segments cannot be reused by {config.name}: {why}; leave out segments=True")


class Segment(NamedTuple):
    """Neighbouring stored tokens that a prompt holds at another place.

    Attributes
    ----------
    at : int
        Position in the prompt of the first token that is reused.
    source : int
        Its position where it was stored.
    n : int
        Tokens reused.
    skip : int
        Tokens of the first block before it, which are computed afresh.
    blocks : list of Block
    lineage : list of Block
        Those and all before them, first block first.
    """

    at: int
    source: int
    n: int
    skip: int
    blocks: list
    lineage: list

    def is_approximate(self, model):
        """Whether the rows differ from those the prompt's own history would give, beyond the order of summation."""
        rounded_twice = self.at != self.source and model.precision.kv != "fp32"
        return model.config.n_layers > 1 or rounded_twice


class SegmentIndex:
    """Stored blocks by the token ids they hold, whatever their history."""

    def __init__(self, model, block_size):
        self.block_size = block_size
        self._blocks = {}  # ids -> {key: block}; the ids themselves tell, there is no hash to collide

    def add(self, blocks):
        for block in blocks:
            self._blocks.setdefault(block.ids, {})[block.key] = block

    def forget(self, dropped):
        for block in dropped:
            same = self._blocks.get(block.ids, {})
            if same.pop(block.key, None) and not same:
                del self._blocks[block.ids]

    def find(self, store, ids, start, n_recomputed):
        """Segments of `ids` from position `start` on, the last token left out.

        Parameters
        ----------
        n_recomputed : int
            Tokens at the beginning of each to leave out.
        """
        text, size, stop, found = ids.tobytes(), self.block_size, len(ids) - 1, []
        while start + size <= stop:
            same = self._blocks.get(text[8 * start : 8 * (start + size)])
            if same is None:
                start += 1
                continue
            block = next(reversed(same.values()))  # the newest
            blocks, end = [block], start + size
            while end + size <= stop and (block := store.child(blocks[-1], text[8 * end : 8 * (end + size)])):
                blocks.append(block)
                end += size
            lineage = store.lineage(blocks[-1])
            n = end - start - n_recomputed
            if n > 0:
                source = (len(lineage) - len(blocks)) * size + n_recomputed
                found.append(Segment(start + n_recomputed, source, n, n_recomputed, blocks, lineage))
            start = end
        return found


def load_segment(model, cache, segment):
    """Append the rows of a segment to a cache, keys rotated on to where they are now.

    Recorded as `cache_load`, the stored bytes that the layers take (under a
    window, what it can still see), and as `rope` where keys are rotated.
    """
    config = model.config
    shape = (1, config.n_kv_heads, segment.n, config.head_dim)
    if model.numeric:
        rows = np.concatenate([block.payload for block in segment.blocks], axis=3)[..., segment.skip :, :]
        rows = unheld(rows, cache.format)
        for layer, (window, (keys, values)) in enumerate(zip(config.windows, rows)):
            rotation = model.rope.rotation_by(segment.at - segment.source, window)
            cache.append(layer, keys[None] if rotation is None else _moved_on(keys, rotation), values[None])
    else:
        cache.append(range(config.n_layers), *[Array(spec(shape, model.precision.kv, "kv"))] * 2)
    n_rows = sum([segment.n if window is None else min(segment.n, window - 1) for window in config.windows])
    loaded = n_rows * 2 * model.precision.kv.nbytes((config.n_kv_heads, config.head_dim))
    costs = [("cache_load", Counts(kv_bytes_read=loaded, kv_bytes_written=loaded))]
    if segment.at != segment.source:
        n_elements = config.n_layers * config.n_kv_heads * segment.n * 2 * model.rope.half
        costs.append(("rope", Counts(elementwise_flops=3 * n_elements)))
    record(tuple(costs))


def _moved_on(keys, rotation):
    """Keys (n_heads, n, head_dim) turned by the one angle of a rotation (2, 1, 1, 2, half): (1, n_heads, n, head_dim)."""
    n_heads, n, head_dim = keys.shape
    rows = keys.swapaxes(0, 1).reshape(n, n_heads * head_dim)
    rotation = np.broadcast_to(rotation, (2, n, *rotation.shape[2:]))
    return ops.rope.__wrapped__(rows, rotation, head_dim=head_dim, turned=(n_heads,))
