"""GPU profiles: what a device offers at most, in base units.

`gpu` gives one profile, by a name from gpus.toml or from a TOML file of the
user's own; `gpus` lists the names.  gpus.toml says what each key means.  A rate
that a profile lacks is None, or missing from `matmul_flops_per_s`: unknown, not zero.

Read `GPU` (the record), `_profiles` (from a TOML table to records), then `gpu`.
"""

import os
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache

from npinfer.errors import InputError, UnknownName
from npinfer.tables import read_table, table_names

# fp16, bf16 and fp8 accumulate in fp32; the -fp16acc ones in fp16, which GeForce cards do twice as fast.
COMPUTE_FORMATS = ("fp32", "fp16", "fp16-fp16acc", "bf16", "fp8", "fp8-fp16acc", "int8", "fp4")

_FILE = os.path.join(os.path.dirname(__file__), "gpus.toml")


class ProfileError(InputError):
    """A GPU profile that cannot be read, or whose values cannot be meant as they stand."""


@dataclass(frozen=True)
class GPU:
    """One device with one memory size.  Rates are dense peaks; links are one direction."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    matmul_flops_per_s: dict = field(default_factory=dict)  # by compute format; may be empty
    vector_flops_per_s: float | None = None
    last_level_cache_bytes: int | None = None
    host_link_bytes_per_s: float | None = None
    interconnect_bytes_per_s: float | None = None
    interpreter: dict | None = None  # of a host: how npinfer itself does there
    vendor: str = ""
    architecture: str = ""
    memory_kind: str = ""
    host_link: str = ""
    interconnect: str = ""
    source: str = ""
    cross_check: str = ""
    note: str = ""
    confidence: str = ""


_KEYS = tuple(f.name for f in fields(GPU))
# What is counted, an example, the least value that can be meant, and the least usual one, which tells GB from TB.
_NUMBERS = {
    "memory_bytes": ("bytes", "24e9", 1e6, 1e9),
    "memory_bytes_per_s": ("bytes per second", "1008e9", 1e9, 1.2e10),
    "matmul_flops_per_s": ("FLOPs per second", "165.2e12", 1e9, 1e12),
    "vector_flops_per_s": ("FLOPs per second", "82.58e12", 1e8, 1e12),
    "last_level_cache_bytes": ("bytes", "72e6", 1e3, 1e6),
    "host_link_bytes_per_s": ("bytes per second", "31.5e9", 1e6, 1e9),
    "interconnect_bytes_per_s": ("bytes per second", "450e9", 1e6, 1e9),
    "operation_s": ("seconds", "10e-6", 1e-9, 1e-6),
    "product_s": ("seconds", "50e-6", 1e-9, 1e-6),
    "packing_bytes_per_s": ("bytes per second", "8e9", 1e6, 1e9),
    "kv_bytes_per_s": ("bytes per second", "6e9", 1e6, 1e9),
}
INTERPRETER = ("operation_s", "product_s", "packing_bytes_per_s", "kv_bytes_per_s")


def _number(where, key, value):
    """`value` if it can be what `key` counts, in base units."""
    unit, example, least, usual = _NUMBERS[key.partition(".")[0]]
    met = f"{where}: {key} is {value!r}, expected {unit}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{met} as a number, such as {example}")
    if not min(1e-3, least) <= value < 1e30:  # nan fails too
        raise ProfileError(f"{met}, positive and finite, such as {example}; leave out what is not known")
    if value < least:
        power = next((p for p in (3, 6, 9) if value * 10**p >= usual), 12)
        raise ProfileError(f"{met}; did you mean {value:.15g}e{power}?")
    return value


def _rates(where, key, table):
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: {key} is {table!r}, expected a table of rates, such as {{ fp16 = 165.2e12 }}")
    for name in table:
        if name not in COMPUTE_FORMATS:
            raise ProfileError(f"{where}: {key} has {name!r}, no compute format; known: {', '.join(COMPUTE_FORMATS)}")
    return {name: float(_number(where, f"{key}.{name}", rate)) for name, rate in table.items()}


def _interpreter(where, table):
    if not isinstance(table, dict) or table.keys() != set(INTERPRETER):
        met = ", ".join(table) or "nothing" if isinstance(table, dict) else repr(table)
        raise ProfileError(f"{where}: interpreter has {met}, expected a table of {', '.join(INTERPRETER)}")
    for key in ("operation_s", "product_s"):
        if isinstance(table[key], int | float) and table[key] >= 1:
            raise ProfileError(f"{where}: {key} is {table[key]!r}, expected seconds, such as {_NUMBERS[key][1]}; are they us?")
    return {key: float(_number(where, key, value)) for key, value in table.items()}


def _profiles(where, name, table):
    """The profiles of a TOML table, one for each memory size, smallest first."""
    values = {"name": name}  # a name in the table replaces it
    for key, value in table.items():
        if key not in _KEYS:
            raise ProfileError(f"{where}: unknown key {key!r}; known: {', '.join(_KEYS)}")
        if key == "matmul_flops_per_s":
            values[key] = _rates(where, key, value)
        elif key == "interpreter":
            values[key] = _interpreter(where, value)
        elif key == "memory_bytes":
            sizes = value if isinstance(value, list) and value else [value]
            values[key] = sorted(int(_number(where, key, size)) for size in sizes)
        elif key in _NUMBERS:
            values[key] = (int if key.endswith("_bytes") else float)(_number(where, key, value))
        elif isinstance(value, str):
            values[key] = value
        else:
            raise ProfileError(f"{where}: {key} is {value!r}, expected text in quotes")
    for key in ("memory_bytes", "memory_bytes_per_s"):
        if key not in values:
            raise ProfileError(f"{where}: {key} is missing; give {_NUMBERS[key][0]}, such as {_NUMBERS[key][1]}")
    sizes = values.pop("memory_bytes")
    if len(sizes) == 1:
        return [GPU(memory_bytes=sizes[0], **values)]
    name = values.pop("name")
    return [GPU(name=f"{name}-{size / 1e9:g}gb", memory_bytes=size, **values) for size in sizes]


@cache
def _known(table):
    return _profiles(f"gpus.toml: [{table}]", table, read_table(_FILE, table, "GPU"))


def _from_file(path):
    """A user's profile: bare keys, or one table with any name."""
    import tomllib  # only a user's own file is parsed whole

    try:
        with open(path, encoding="utf-8-sig") as file:
            keys = tomllib.loads(file.read())
    except OSError as error:
        raise ProfileError(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML file or a name of costmodel.gpus()"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise ProfileError(f"{path}: is not TOML ({error}); expected lines such as memory_bytes = 24e9") from None
    tables = [key for key, value in keys.items() if isinstance(value, dict) and key not in _KEYS]
    if len(tables) > 1:
        raise ProfileError(f"{path}: holds {len(tables)} tables ({', '.join(tables)}), expected one GPU a file")
    name, table = keys.popitem() if len(tables) == len(keys) == 1 else (os.path.splitext(os.path.basename(path))[0], keys)
    return _profiles(path, name, table)[0]


def gpus():
    """Names of the known GPUs; one that is sold with several memory sizes appears once for each."""
    return [profile.name for table in table_names(_FILE) for profile in _known(table)]


def gpu(name_or_path):
    """The profile of a GPU.

    Parameters
    ----------
    name_or_path : str, path or GPU
        A name of `gpus()`; or such a name without its memory size, which means
        the smallest size sold, so that what is said to fit does fit; or a path
        (a string that ends in .toml, or an `os.PathLike`) to a file with the keys of
        gpus.toml, bare or under one table.  A GPU is returned as it is.

    Raises
    ------
    UnknownName
        If there is no such name; the message lists those that are close.
    ProfileError
        If the file cannot be read, or a key or value in it cannot be used.

    >>> gpu("rtx-4060-ti") == gpu("rtx-4060-ti-8gb"), gpu("rtx-4060-ti-16gb").memory_bytes
    (True, 16000000000)
    """
    if isinstance(name_or_path, GPU):
        return name_or_path
    if isinstance(name_or_path, os.PathLike) or (isinstance(name_or_path, str) and name_or_path.endswith(".toml")):
        return _from_file(os.fspath(name_or_path))
    if not isinstance(name_or_path, str):
        raise ProfileError(f"gpu is {name_or_path!r}, expected a name of costmodel.gpus() or the path of a TOML file")
    tables = table_names(_FILE)
    for table in (name_or_path, re.sub(r"-[0-9]+gb$", "", name_or_path)):
        for profile in _known(table) if table in tables else []:
            if name_or_path in (table, profile.name):
                return replace(profile, matmul_flops_per_s={**profile.matmul_flops_per_s})  # the caller's own
    import difflib  # needed for a mistyped name only

    names = gpus()
    close = difflib.get_close_matches(name_or_path.lower(), names, 8, 0.4)
    raise UnknownName("GPU", name_or_path, close or [*names[:8], f"and {len(names) - 8} more (costmodel.gpus(), --list-gpus)"])
