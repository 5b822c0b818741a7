"""Stored bytes of weights and of KV rows, by format.

Worked from the bits of an element and the name of the format alone; shares no
code with `npinfer.formats.Format.nbytes`, which sees the shapes of real arrays.
"""

from functools import lru_cache

import numpy as np

from npinfer.formats import FORMATS

SCALE_BYTES = 2  # an fp16 number


def matrix_bytes(format_, d_out, d_in):
    """Bytes of a (d_out, d_in) matrix: its elements, rounded up to whole bytes, and its scales."""
    scales = {"int8": d_out, "int4": d_out * -(-d_in // 128)}.get(format_, 0)
    return _ceil_bytes(format_.bits, d_out * d_in) + SCALE_BYTES * scales


def embedding_bytes(config, precision, n_rows):
    """Bytes of so many rows of the embedding, each with its scales; `n_rows` may be an array."""
    format_, scales = _embedding_format(config.d_model, precision)
    return _ceil_bytes(format_.bits, n_rows * config.d_model) + SCALE_BYTES * scales * n_rows


@lru_cache(maxsize=256)
def _embedding_format(d_model, precision):
    """Format of the embedding, and scales of one row."""
    (format_,) = formats(precision, "embed", (None,), is_matrix=True)
    return format_, {"int8": 1, "int4": -(-d_model // 128)}.get(format_, 0)


def kv_token_bytes(config, precision):
    """Bytes that one token adds to the cache of one layer: an int8 row has a scale for each part and head."""
    parts, heads, width = config.kv_shape
    scales = parts * heads if precision.kv == "int8" else 0
    return parts * heads * (width * precision.kv.bits // 8) + SCALE_BYTES * scales


def formats(precision, name, layers, is_matrix):
    """In how many of `layers` a tensor is stored in which format.

    What `precision.exceptions` says of a tensor in one layer goes before what
    they say of it in all layers, and that before the format of all others:
    vectors stay at 16 bits beside matrices of fewer.

    Parameters
    ----------
    layers : tuple of int
        (None,) outside the layers.

    Returns
    -------
    dict
        Format -> number of layers.
    """
    said = {layer: FORMATS[format_] for tensor, layer, format_ in precision.exceptions if tensor == name}
    if is_matrix:
        usual = precision.matrices
    else:
        usual = precision.weights if precision.weights.bits >= 16 else FORMATS["fp16"]
    usual = said.pop(None, usual)
    numbers = {}
    for format_ in [said[layer] for layer in layers if layer in said] if said else []:
        numbers[format_] = numbers.get(format_, 0) + 1
    n_usual = len(layers) - sum(numbers.values())
    if n_usual:
        numbers[usual] = numbers.get(usual, 0) + n_usual
    return numbers


@lru_cache(maxsize=256)
def _exact_ratio(bits):
    from decimal import Decimal

    return Decimal(repr(float(bits))).as_integer_ratio()


def _ceil_bytes(bits, n_elements):
    if isinstance(bits, int):
        return -(-n_elements * bits // 8)
    exact, per = _exact_ratio(bits)
    if isinstance(n_elements, np.ndarray):  # an exact numerator may have no room in int64
        return (-(-n_elements.astype(object) * exact // (8 * per))).astype(np.int64)
    return -(-n_elements * exact // (8 * per))
