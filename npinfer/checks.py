"""Checks of the numbers that a config is made of: the value, or a `ConfigError` that names it."""

import operator

from npinfer.errors import ConfigError

MAX_SIZE = 2**31  # a dimension beyond this is a typing error, not a model
MAX_LAYERS = 2**16  # layers are Python objects: a hundred times the deepest model published


def whole(name, value, least=1, most=MAX_SIZE):
    """`value` as an int from `least` to `most`, or a `ConfigError` that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    if not least <= number <= most:
        limit = f"2**{most.bit_length() - 1}" if most in (MAX_SIZE, MAX_LAYERS) else most
        raise ConfigError(f"{name} is {number!s:.40}, expected from {least} to {limit}")
    return number


def positive(name, value):
    """`value` as a float if it is a positive finite number, or a `ConfigError` that names it."""
    try:
        number = 0.0 if isinstance(value, bool | str) else float(value)  # a NumPy scalar would widen what it meets
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name} is {value!r:.40}, expected a positive number")
    return number


def flag(name, value):
    """`value` if it is a bool, or a `ConfigError` that names it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected true or false")
    return value


def one_of(name, value, known):
    """`value` if it is one of `known`, or a `ConfigError` that lists them."""
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(str, known))}")
    return value


def settle(record, check, *names, prefix="", **limits):
    """Replace fields of a frozen dataclass by what `check` makes of them; None stays where it is the default."""
    for name in names:
        value = getattr(record, name)
        if value is not None or getattr(type(record), name, 0) is not None:
            object.__setattr__(record, name, check(prefix + name, value, **limits))
