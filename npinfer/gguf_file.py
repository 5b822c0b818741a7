"""Read GGUF files: mapped into memory, every claim of a file checked before it is believed.

A file is, all of it little-endian,

    4 bytes    "GGUF"
    u32        version: 2 or 3
    2 u64      number of tensors, number of metadata pairs
    pairs      key, type (u32), value
    tensors    name, number of dimensions (u32), dimensions (u64 each, the innermost first), type (u32), offset (u64)
    the rest   values of the tensors in this order; offsets count from here

where a text is its length (u64) and UTF-8, an array its type (u32), length
(u64) and items.  The rest begins, and each tensor in it ends, with zeros up to
a multiple of `general.alignment`, so that every byte has its place.

This header is read here and not by the gguf package, whose reader takes a
lying length at its word, and seconds for a vocabulary; what the package knows
of the types of tensors, and how to dequantise them, is used.

Read `GgufFile` (what a caller gets), then `open_gguf` (what a file must satisfy).

Source: GGUF specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import mmap
import struct
from typing import NamedTuple

import numpy as np

from npinfer.errors import CheckpointError, InputError
from npinfer.safetensors import _fault, _map, _show

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _TEXT, _ARRAY = 6, 8, 9
_MAX_ITEMS = 2**21  # eight times the largest vocabulary published; a longer list is a lie
_ELEMENTS_AT_ONCE = 2**15  # of a tensor that is dequantised: the arrays on the way stay in the CPU's cache
# Types of tensors that are read, by the gguf package's names: ours.
FORMATS_READ = {
    "F32": "fp32", "F16": "fp16", "BF16": "bf16",
    "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k", "Q6_K": "q6_k",
}  # fmt: skip


def gguf_package():
    """The gguf package, or an `InputError` that names the extra it comes with."""
    try:
        import gguf
    except ImportError:
        raise InputError('reading a GGUF file needs the gguf package; pip install "npinfer[gguf]"') from None
    return gguf


class _Stored(NamedTuple):
    """One tensor's place in the mapped file."""

    type: object
    shape: tuple
    begin: int
    n_bytes: int


class GgufFile:
    """Metadata and tensors of a GGUF file; made by `open_gguf`.

    The file stays mapped while this object or a view of it is in use.

    Attributes
    ----------
    path : str
    metadata : dict
        Values by key: int, float, bool, str, or a list of these.
    """

    def __init__(self, path, buffer, metadata, stored):
        self.path, self.metadata, self._buffer, self._stored = path, metadata, buffer, stored

    def __contains__(self, name):
        return name in self._stored

    def names(self):
        """Names of all tensors, a list."""
        return list(self._stored)

    def shape(self, name):
        """Shape, a tuple of ints, the innermost dimension last."""
        return self._stored[name].shape

    def format(self, name):
        """Name of the storage format, such as "q4_1"."""
        return FORMATS_READ[self._stored[name].type.name]

    def float32(self, name):
        """The values as float32: a read-only view of the map if they are stored so, else dequantised."""
        kind, shape, begin, n_bytes = self._stored[name]
        if kind.name == "F32":
            return np.ndarray(shape, "<f4", self._buffer, begin)
        gguf = gguf_package()
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = np.ndarray((n_bytes // block_bytes, block_bytes), np.uint8, self._buffer, begin)
        out = np.empty((len(stored), per_block), np.float32)
        step = _ELEMENTS_AT_ONCE // per_block
        with np.errstate(all="ignore"):  # a damaged scale may be infinite
            for at in range(0, len(stored), step):
                blocks = stored[at : at + step].reshape(1, -1)
                out[at : at + step] = gguf.quants.dequantize(blocks, kind).reshape(-1, per_block)
        if hasattr(mmap, "MADV_DONTNEED"):  # read once: the system need not hold these pages for us
            page = begin - begin % mmap.PAGESIZE
            self._buffer.madvise(mmap.MADV_DONTNEED, page, begin + n_bytes - page)
        return out.reshape(shape)


class _Header:
    """Reads the header from front to back, and never beyond the end of the file."""

    def __init__(self, path, buffer):
        self.path, self.buffer, self.at = path, buffer, 0

    def numbers(self, code, n=1):
        """The next `n` numbers of a struct code, a tuple."""
        n_bytes = n * struct.calcsize(code)
        self._need(n_bytes)
        numbers = struct.unpack_from(f"<{n}{code}", self.buffer, self.at)
        self.at += n_bytes
        return numbers

    def count(self, what, most=_MAX_ITEMS):
        (n,) = self.numbers("Q")
        if n > most:
            raise self.fault(f"{n} {what}, expected at most {most}")
        return n

    def text(self):
        (n_bytes,) = self.numbers("Q")
        self._need(n_bytes)
        self.at += n_bytes
        try:
            return self.buffer[self.at - n_bytes : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"a text is not UTF-8 ({error.reason})") from None

    def value(self, kind):
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            (kind,), n = self.numbers("I"), self.count("items of an array")
            if kind == _TEXT:
                return [self.text() for _ in range(n)]
            return list(self.numbers(self._code(kind), n))
        (value,) = self.numbers(self._code(kind))
        # The decimal that was meant: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _code(self, kind):
        if kind not in _SCALARS:
            raise self.fault(f"a value has type {kind}, expected 0 to 12, and no array in an array")
        return _SCALARS[kind]

    def _need(self, n_bytes):
        if n_bytes > len(self.buffer) - self.at:
            raise self.fault(f"{len(self.buffer)} bytes, expected {n_bytes} more at byte {self.at} for the header")

    def fault(self, what):
        return _fault(self.path, what, "incomplete or damaged, download it again")


def _metadata(header, n_pairs):
    metadata = {}
    for _ in range(n_pairs):
        key = header.text()
        if key in metadata:
            raise header.fault(f"the metadata key {_show(key)} appears twice")
        (kind,) = header.numbers("I")
        metadata[key] = header.value(kind)
    return metadata


def _tensor(header, gguf):
    """Name, type, shape, stored bytes and offset that the header gives for the next tensor."""
    name = header.text()
    (n_dims,) = header.numbers("I")
    if not 1 <= n_dims <= 4:
        raise header.fault(f"tensor {_show(name)}: {n_dims} dimensions, expected 1 to 4")
    shape = header.numbers("Q", n_dims)[::-1]
    (number,), (offset,) = header.numbers("I"), header.numbers("Q")
    known = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    if number not in known or known[number].name not in FORMATS_READ:
        kind = known[number].name if number in known else number
        raise CheckpointError(
            f"{header.path}: tensor {_show(name)} is of type {kind}, which is not supported; "
            f"supported: {', '.join(FORMATS_READ)}"
        )
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[known[number]]
    if not 1 <= math.prod(shape) <= 2**60 or shape[-1] % per_block:
        raise header.fault(
            f"tensor {_show(name)}: shape {shape}, expected rows of a multiple of {per_block} elements ({known[number].name})"
        )
    return name, known[number], shape, math.prod(shape) // per_block * block_bytes, offset


def open_gguf(path):
    """Open a GGUF file.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    GgufFile

    Raises
    ------
    CheckpointError
        If it cannot be read or is not what it claims to be.
    InputError
        If the gguf package is missing.
    """
    path = str(path)
    buffer = _map(path)
    header = _Header(path, buffer)
    if buffer[:4] != b"GGUF":
        raise _fault(path, f"begins with {buffer[:4]!r}, expected b'GGUF'", "not such a file (Git LFS pointer?): download it")
    gguf = gguf_package()  # once there is something for it to read
    header.at = 4
    (version,) = header.numbers("I")
    if version not in (2, 3):
        raise _fault(path, f"version {version} of GGUF, expected 2 or 3, little-endian", "convert it anew")
    n_tensors, n_pairs = header.count("tensors"), header.count("metadata pairs")
    metadata = _metadata(header, n_pairs)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise header.fault(f"general.alignment is {_show(alignment)}, expected a power of two from 8 to 2**20")

    tensors = [_tensor(header, gguf) for _ in range(n_tensors)]
    start = begin = _padded(header.at, alignment)
    stored = {}
    for name, kind, shape, n_bytes, offset in tensors:
        if name in stored:
            raise header.fault(f"tensor {_show(name)} appears twice")
        if start + offset != begin:
            raise header.fault(f"tensor {_show(name)} is at offset {offset}, expected {begin - start}, behind the one before")
        stored[name] = _Stored(kind, shape, begin, n_bytes)
        begin = _padded(begin + n_bytes, alignment)
    if begin != len(buffer):
        raise header.fault(f"{len(buffer)} bytes, expected {begin} by its header")
    return GgufFile(path, buffer, metadata, stored)


def _padded(n, alignment):
    return -(-n // alignment) * alignment
