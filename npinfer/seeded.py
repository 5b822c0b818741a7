"""Weights made from a seed."""

from zlib import crc32

import numpy as np


def random_source(seed):
    """A source of normally distributed weights; the same seed gives the same model, in whatever order it is asked.

    Matrices have standard deviation 1 / sqrt(d_in), so that activations keep
    their size through the layers; gains are near 1 and biases near 0, not
    equal to them, so that leaving one out shows.
    """

    def source(name, layer, shape, expert=None):
        place = [seed, crc32(name.encode()), *[0 if number is None else number + 1 for number in (layer, expert)]]
        values = np.random.default_rng(place).standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values *= np.float32(shape[1] ** -0.5)
        else:
            values *= np.float32(0.1)
            if name.endswith("norm"):
                values += np.float32(1)
        return values

    return source
