"""Weights kept in fewer bits than they are multiplied in, and widened to float32 a tile at a time.

`packed` gives the array that is kept, `widen` writes the float32 values of
some of its rows; a product does so just before it uses them, while a cache
still holds them.
"""

import numpy as np

from npinfer.formats import rounded

PACKED = (np.dtype(np.uint16), np.dtype(np.float16), np.dtype(np.int8))
CHUNK_ELEMENTS = 2**18
TWO_112 = np.float32(2.0**112)


def packed(values, format_):
    """Values rounded to a format, or codes of it, as the smallest array that holds them.

    Parameters
    ----------
    values : float32 array
        Or codes, as `npinfer.formats.quantised` gives them.
    format_ : Format

    Returns
    -------
    uint16 array for bf16 (the upper half of each float32), float16 for fp16,
    int8 for int8 and int4 (a code each); `values` itself for other formats,
    and float32 for fp16 that is not finite.
    """
    if format_ == "bf16":
        out = np.empty(values.shape, np.uint16)
        n_rows = max(1, CHUNK_ELEMENTS // values.shape[-1])
        for start in range(0, len(values), n_rows):  # so that a cache holds what rounding leaves behind
            rows = slice(start, start + n_rows)
            np.right_shift(rounded(values[rows], format_).view(np.uint32), np.uint32(16), out=out[rows], casting="unsafe")
        return out
    if format_ == "fp16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        return halves if np.isfinite(halves).all() else halves.astype(np.float32)  # `widen` knows no infinity in 16 bits
    return values if format_.group is None else values.astype(np.int8)


def widen(rows, out):
    """Write the float32 values of packed rows into `out`, a contiguous float32 array of their shape."""
    if rows.dtype == np.uint16:
        np.left_shift(rows, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    elif rows.dtype == np.float16:
        _widen_fp16(rows.view(np.int16), out.view(np.int32), out)
    else:
        out[...] = rows


def _widen_fp16(halves, bits, out):
    """Move sign, exponent and fraction to their places in a float32, and correct the exponent's bias by 2**112.

    Several times as fast as a conversion by NumPy; exact for every finite
    number, subnormal ones included.
    """
    np.left_shift(halves, np.int32(16), out=bits, dtype=np.int32)
    np.right_shift(bits, np.int32(3), out=bits)  # arithmetic: three copies of the sign above the exponent
    np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # 0x8fffe000: two of them cleared
    np.multiply(out, TWO_112, out=out)

