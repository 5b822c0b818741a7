"""Rotary position embedding: which angle a position turns each pair of a head by.

Tables are made in float64 and stored in float32: an angle of a position in the
tens of thousands has no room in 16 bits, and little in 32.
"""

import numpy as np

from npinfer.scaling import unscaled
from npinfer.specs import Array, spec


class RopeTable:
    """Cosines and sines by position, for the layers of a model."""

    def __init__(self, config, numeric):
        self.half, self.numeric = config.rope_dim // 2, numeric
        self._tables = None
        if numeric and self.half:
            everywhere = _Table(config.rope_theta, config.rope_scaling, config.rope_dim)
            local = config.local_rope_theta
            self._tables = everywhere, everywhere if local is None else _Table(local, None, config.rope_dim)

    def rotation(self, start, n_new, window=None):
        """Cosines and sines of positions from start on, in layers with this window: `Array` (2, n_new, 1, 2, half)."""
        shape = 2, n_new, 1, 2, self.half
        if not self.numeric:
            return Array(spec(shape, None, "constant"))
        tables = self._tables
        rotation = tables[window is not None].rotation(start, n_new) if tables else np.empty(shape)
        return Array(spec(shape, None, "constant"), rotation)

    def rotation_by(self, distance, window=None):
        """Cosines and sines (2, 1, 1, 2, half) that move keys on by `distance` positions, also back; None for 0."""
        return None if distance == 0 else self._tables[window is not None].rotation_by(distance)


class _Table:
    """Cosines and sines of one base and scaling, extended when a longer context asks for them."""

    def __init__(self, theta, scaling, dim):
        self.theta, self.scaling, self.dim = theta, scaling, dim
        self.frequencies = self._frequencies(0)
        self.table = np.empty((2, 0, 1, 2, dim // 2), np.float32)

    def _frequencies(self, length):
        if self.scaling is None:
            return unscaled(self.theta, self.dim)
        return self.scaling.stretched(self.theta, self.dim, length)

    def _turned(self, positions, frequencies, factor):
        angles = positions[:, None] * frequencies
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        # The first of a pair becomes first * cos - second * sin, the second one second * cos + first * sin.
        table = np.stack([np.stack([cos, cos], axis=1), np.stack([-sin, sin], axis=1)])
        return table[:, :, None].astype(np.float32)  # one for all heads

    def rotation_by(self, distance):
        return self._turned(np.array([distance], np.float64), self.frequencies, 1.0)

    def rotation(self, start, n_new):
        stop, factor = start + n_new, 1.0 if self.scaling is None else self.scaling.attention_factor
        if self.scaling is not None and self.scaling.by_length and stop > self.scaling.original_max_context:
            return tuple(self._turned(np.arange(start, stop, dtype=np.float64), self._frequencies(stop), factor))
        table = self.table  # another thread may put a table of its own in place
        if stop > table.shape[1]:
            positions = np.arange(max(stop, 2 * table.shape[1], 256), dtype=np.float64)
            table = self.table = self._turned(positions, self.frequencies, factor)
        return tuple(table[:, start:stop])
