"""Engine profiles: how near a real engine comes to the roofline.

engines.toml says what its keys mean.  Read `Parameter` and `Engine` (the
records), then `engine`, which finds the profile for a name, a version and a device.
"""

import os
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

from npinfer.errors import UnknownName
from npinfer.tables import read_table, table_names

FILE = os.path.join(os.path.dirname(__file__), "engines.toml")


@dataclass(frozen=True, eq=False, repr=False)
class Parameter:
    """One fitted number: `value` in `unit`, multiplied by what it is `per`."""

    name: str
    value: float
    per: str
    unit: str
    meaning: str
    rows: int
    devices: int
    fixed: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Engine:
    """One engine on one vendor's devices: the parameters that act on it, by name, and how well it was predicted."""

    name: str
    stream: str
    layer: list
    products: dict
    source: str
    slow_stream: str = ""
    sparse_layer: list = field(default_factory=list)
    request: list = field(default_factory=list)
    compute: dict = field(default_factory=dict)
    score: str = ""
    score_byte: str = ""
    unfused: bool = False
    widens: bool = False
    interpreted: bool = False
    micro_batch_tokens: int | None = None
    tile_tokens: int | None = None
    aliases: list = field(default_factory=list)
    by_vendor: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)
    note: str = ""
    date: str = ""
    rows_decode: int = 0
    error_decode: float | None = None
    p90_decode: float | None = None
    range_decode: list | None = None
    rows_prefill: int = 0
    error_prefill: float | None = None
    p90_prefill: float | None = None
    range_prefill: list | None = None

    @cached_property
    def ranges(self):
        """10th and 90th percentile of measured / expected time, of prefill and of decode; generic's where its devices are few."""
        if self.interpreted:
            return None, None  # one machine, and no other to have learned its errors from
        generic = _engine("generic")
        return self.range_prefill or generic.range_prefill, self.range_decode or generic.range_decode

    def formats(self, quantised):
        """Compute formats that it has kernels for, by whether weights have fewer than 16 bits; none: any."""
        return self.compute.get("quantised" if quantised else "other", [])

    @cached_property
    def basis(self):
        """What the expected level stands on, as a plain dict."""
        fields_ = ("rows_decode", "error_decode", "rows_prefill", "error_prefill", "date")
        return {"engine": self.name, **{name: getattr(self, name) for name in fields_}}


@cache
def _table(name):
    """The raw table of a parameter or of an engine."""
    return read_table(FILE, name, "engine")


def _is_engine(name):
    return "per" not in _table(name)


@cache
def parameter(name):
    """One `Parameter`."""
    return Parameter(name=name, **_table(name))


def parameters():
    """All parameters: name -> Parameter."""
    return {name: parameter(name) for name in table_names(FILE) if not _is_engine(name)}


@cache
def _engine(name):
    table = _table(name)
    known = {f.name for f in fields(Engine)}
    unknown = table.keys() - known
    assert not unknown, f"engines.toml: [{name}] has unknown keys {sorted(unknown)}"
    return Engine(name=name, **table)


def names():
    """Names of the known engines, those for another vendor's devices and for older versions included."""
    return [name for name in table_names(FILE) if _is_engine(name)]


@cache
def _spellings():
    """Every name that an engine may be asked for by, longest first."""
    spelt = {alias: name for name in names() for alias in (name, *_engine(name).aliases)}
    return sorted(spelt.items(), key=lambda item: -len(item[0]))


@cache
def engine(name, vendor="NVIDIA"):
    """The profile of an engine on a vendor's devices.

    Parameters
    ----------
    name : str
        A name of `names()` in any case, "vLLM", with or without a version
        behind it, "vLLM 0.7.3"; "llama.cpp unfused" and "llama.cpp fused" say
        whether attention is.
    vendor : str
        Of the GPU profile.

    Raises
    ------
    UnknownName
        If there is no such engine; "generic" is for one that is not listed.

    >>> engine("vLLM 0.7.3").name, engine("llama.cpp", "Apple").name
    ('vllm-0.7', 'llama.cpp-metal')
    """
    asked = re.sub(r"[^a-z0-9.]+", "-", str(name).lower()).strip("-")
    if asked in table_names(FILE) and _is_engine(asked):  # one table to read, not all
        return _for_device(_engine(asked), "", vendor)
    attention = re.search(r"-(un)?fused$", asked)
    asked = asked[: attention.start()] if attention else asked
    for spelling, known in _spellings():
        if asked == spelling or re.match(re.escape(spelling) + r"[-v0-9]", asked):
            found = _for_device(_engine(known), asked[len(spelling) :].lstrip("-v"), vendor)
            return replace(found, unfused=attention[1] is not None) if attention else found
    raise UnknownName("engine", name, [*names(), "generic is for an engine that is not listed"])


def _for_device(profile, version, vendor):
    if vendor in profile.by_vendor:
        return _engine(profile.by_vendor[vendor])
    for pattern, table in profile.versions.items():
        if version and re.fullmatch(pattern, version):
            return _engine(table)
    return profile
