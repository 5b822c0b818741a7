"""Rotary position embedding: which angle a position turns each pair of a head by.

Tables are made in float64 and stored in float32: an angle of a position in the
tens of thousands has no room in 16 bits, and little in 32.
"""

import numpy as np

from npinfer.specs import Array, spec


def inverse_frequencies(config):
    """Radians per position of each pair, float64 array of shape (head_dim / 2,).

    Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2; the
    stretching is that of the Llama 3.1 release (`npinfer.config.RopeScaling`).
    """
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    frequencies = float(config.rope_theta) ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_context * frequencies / (2 * np.pi)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class RopeTable:
    """Cosines and sines by position, extended when a longer context asks for them."""

    def __init__(self, config, numeric):
        self.half = config.head_dim // 2
        self._frequencies = inverse_frequencies(config) if numeric else None
        self._table = np.empty((2, 0, self.half), np.float32)

    def rotation_by(self, distance):
        """Cosines and sines (2, 1, head_dim / 2) that move keys on by `distance` positions, also back; None for 0."""
        if distance == 0:
            return None
        angles = distance * self._frequencies[None]
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def rotation(self, start, n_new):
        """Cosines and sines of positions start to start + n_new - 1: `Array` (2, n_new, head_dim / 2)."""
        shape = spec((2, n_new, self.half), None, "constant")
        if self._frequencies is None:
            return Array(shape)
        table, stop = self._table, start + n_new  # another thread may put a table of its own in place
        if stop > table.shape[1]:
            positions = np.arange(max(stop, 2 * table.shape[1], 256), dtype=np.float64)
            angles = positions[:, None] * self._frequencies
            table = self._table = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        return Array(shape, table[:, start:stop])
