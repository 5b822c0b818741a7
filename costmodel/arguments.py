"""Arguments that may be whole numbers or integer arrays: checked, and kept from wrapping."""

import operator
from functools import wraps

import numpy as np

from npinfer.errors import InputError

INT64_MAX = 2**63 - 1
NUMPY = np.ndarray, np.generic


class Symbol:
    """Base of numbers that formulas hand through as they are, see `costmodel.traced`."""


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
