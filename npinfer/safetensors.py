"""Read safetensors checkpoints: mapped into memory, every claim of a file checked before it is believed.

A checkpoint is a folder as published: `model.safetensors`, or shards with a
`model.safetensors.index.json` that says which shard holds which tensor.  A file is

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {name: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, ...},
               and optionally "__metadata__": {text: text}; may end in spaces
    the rest   the values, little-endian, row-major; offsets count from here

and every byte of the rest belongs to exactly one tensor.  Opening a folder
reads headers only and holds them to the size of the files; values come from
the disk when they are used.  Every fault is a `CheckpointError`.

Read `Tensors` (what a caller gets), then `_open_file` (what a file must
satisfy), then `open_folder`.

Source: safetensors format description, github.com/huggingface/safetensors,
README.md, sections "Format" and "Benefits" (at most 100 MB of header); bits per
element from `Dtype::bitsize` in its safetensors/src/tensor.rs.
"""

import json
import math
import mmap
import ntpath
import os
import reprlib
import stat
from typing import NamedTuple

import numpy as np

from npinfer.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}
# What can be read; the others are only measured, since a file may hold buffers that nobody asks for.
_READABLE = {"F32": ("fp32", "<f4"), "F16": ("fp16", "<f2"), "BF16": ("bf16", "<u2")}  # NumPy has no bf16: its bits

_brief = reprlib.Repr()  # shows a name or value on one line, however long or deep the file made it
_brief.maxstring = 120
_show = _brief.repr


class _Stored(NamedTuple):
    """One tensor's place in a mapped file; offsets count from the start of the file."""

    path: str
    buffer: mmap.mmap
    dtype: str
    shape: tuple
    begin: int
    end: int


class Tensors:
    """The tensors of a checkpoint by name; made by `open_folder`.

    The files stay mapped while this object or an array that `read` gave is in
    use, and must not be shortened meanwhile.
    """

    def __init__(self, folder, stored):
        self._folder, self._stored = folder, stored
        self._buffers = list({id(tensor.buffer): tensor.buffer for tensor in stored.values() if len(tensor.buffer)}.values())

    def __contains__(self, name):
        return name in self._stored

    def __len__(self):
        return len(self._stored)

    def names(self):
        """Names of all tensors, a list."""
        return list(self._stored)

    def shape(self, name):
        """Shape, a tuple of ints."""
        return self._find(name).shape

    def dtype(self, name):
        """Storage format: "fp32", "fp16", "bf16"; what cannot be read keeps the file's name for it, such as "I64"."""
        dtype = self._find(name).dtype
        return _READABLE.get(dtype, (dtype,))[0]

    def read(self, name):
        """The values as they are stored.

        Returns
        -------
        numpy.ndarray
            A read-only view of the mapped file: float32 for fp32, float16 for
            fp16, and for bf16 its bits as uint16.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or it is stored in another dtype.
        """
        path, buffer, dtype, shape, begin, _ = self._find(name)
        if dtype not in _READABLE:
            raise _fault(path, f"tensor {_show(name)} is stored as {dtype}, expected {', '.join(_READABLE)}",
                         "convert the checkpoint to one of these")
        return np.ndarray(shape, _READABLE[dtype][1], buffer, begin)

    def float32(self, name, part=lambda values: values):
        """The values as float32, exactly: the view that `read` gives of fp32, a widened copy of fp16 and bf16.

        `part` is called with what `read` gives, and what it returns of that is widened.
        What was read before is let go of: most of it has been copied, and a view finds its pages again when it is used.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for buffer in self._buffers:
                buffer.madvise(mmap.MADV_DONTNEED)
        values = part(self.read(name))
        if self.dtype(name) != "bf16":
            return values.astype(np.float32, copy=False)
        bits = values.astype(np.uint32)
        bits <<= 16  # bf16 is the upper half of a float32
        return bits.view(np.float32)

    def _find(self, name):
        if name not in self._stored:
            raise _fault(self._folder, f"no tensor {_show(name)} among the {len(self)} stored",
                         "check that config.json and the weights belong together")
        return self._stored[name]


def _fault(path, what, remedy="the file is damaged or badly written, download it again"):
    return CheckpointError(f"{path}: {what}; {remedy}")


def _map(path):
    """The file at `path` as a read-only mapping, closed with its last view."""
    try:
        status = os.stat(path)
        regular = stat.S_ISREG(status.st_mode)
        if regular and status.st_size:
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: no path at all, such as one with a zero byte
        raise _fault(path, f"cannot be read ({getattr(error, 'strerror', error)})",
                     "download it, or check its permissions") from error
    raise _fault(path, "is empty" if regular else "is not a file, but a folder or a device", "download it again")


def _json_object(path, kind, text):
    """The bytes `text` as a JSON object; duplicate keys, NaN and infinity are refused."""

    def unique(pairs):
        seen = dict(pairs)
        for key, _ in pairs if len(seen) < len(pairs) else ():
            if seen.pop(key, pairs) is pairs:
                raise ValueError(f"the key {_show(key)} appears twice")
        return seen

    def constant(word):
        raise ValueError(f"{word} is not JSON")

    try:
        if text[:1] != b"{":
            raise ValueError(f"it begins with {text[:1]!r}, expected b'{{'")
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8, and integers of thousands of digits
        raise _fault(path, f"the {kind} is not a valid JSON object ({error})") from error


def _are_counts(values):
    """Whether `values` is a list of integers, as 64 bits can hold; True is not an integer."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _entry(path, name, entry):
    """dtype, shape and offsets that the header gives for one tensor, after they have proved to fit each other."""
    where = f"tensor {_show(name)}:"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _fault(path, f"{where} entry {_show(entry)}, expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _fault(path, f"{where} unknown dtype {_show(dtype)}, expected {', '.join(_READABLE)}",
                     "convert the checkpoint to one of these")
    # A zero dimension makes any shape fit the size, also one that NumPy cannot make.
    if not _are_counts(shape) or len(shape) > 32 or math.prod(n or 1 for n in shape) > 2**60:
        raise _fault(path, f"{where} shape {_show(shape)}, expected at most 32 integers >= 0 with a product <= 2**60")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _fault(path, f"{where} data_offsets {_show(offsets)}, expected [begin, end] with 0 <= begin <= end")
    begin, end = offsets
    n_elements = math.prod(shape)
    if n_elements * _BITS[dtype] != 8 * (end - begin):
        raise _fault(path, f"{where} data_offsets span {end - begin} bytes, expected those of {n_elements} elements "
                           f"of {_BITS[dtype]} bits ({dtype}, shape {_show(shape)})")
    return dtype, tuple(shape), begin, end


def _open_file(path):
    """The tensors of one file by name, after its header has proved to describe the file to the last byte."""
    buffer = _map(path)
    n_bytes, start = len(buffer), 8 + int.from_bytes(buffer[:8], "little")
    if start > min(n_bytes, 8 + _MAX_HEADER_BYTES):  # a file under 8 bytes cannot hold the 8 either
        raise _fault(path, f"{n_bytes} bytes with a header of {start - 8}, expected one that fits in the file and in "
                           f"{_MAX_HEADER_BYTES}", "incomplete, or not such a file (Git LFS pointer?): download it")
    header = _json_object(path, "header", buffer[8:start])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _fault(path, f"__metadata__ is {_show(metadata)}, expected an object of texts")
    stored = {}
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        stored[name] = _Stored(path, buffer, dtype, shape, start + begin, start + end)

    met, last = start, "the header"  # every byte before `met` is accounted for
    for name in sorted(stored, key=lambda name: (stored[name].begin, stored[name].end)):
        where, gap = f"tensor {_show(name)}", stored[name].begin - met
        if gap < 0:
            raise _fault(path, f"{where} overlaps {last} by {-gap} bytes")
        if gap > 0:
            raise _fault(path, f"{gap} bytes between {last} and {where} belong to no tensor")
        met, last = stored[name].end, where
    if met > n_bytes:
        raise _fault(path, f"{n_bytes} bytes, expected {met} to the end of {last}", "incomplete, download it again")
    if met < n_bytes:
        raise _fault(path, f"{n_bytes - met} bytes after {last} belong to no tensor, expected a file of {met} bytes")
    return stored


def _open_shards(folder):
    """The tensors of all shards by name, after index and shards have proved to say the same."""
    path = os.path.join(folder, _INDEX)
    shard_of = _json_object(path, "index", _map(path)[:].lstrip()).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise _fault(path, f"weight_map is {_show(shard_of)}, expected an object of tensor name: file name")
    promised = {}
    for name, shard in shard_of.items():
        promised.setdefault(shard, set()).add(name)
    stored = {}
    for shard, names in promised.items():
        # No way up, and no separator or drive of any system.
        if shard in ("", ".", "..") or ntpath.basename(shard) != shard:
            raise _fault(path, f"weight_map names the shard {_show(shard)}, expected a file name without a folder",
                         "correct the index")
        shard_path = os.path.join(folder, shard)
        held = _open_file(shard_path)
        if differing := sorted(held.keys() ^ names):
            name = differing[0]
            place = _show(shard_of[name]) if name in shard_of else "no shard"
            verb = "lacks" if name in names else "holds"
            raise _fault(shard_path, f"{verb} tensor {_show(name)}, which {_INDEX} expects in {place}",
                         "download the index and all shards of one revision")
        stored |= held
    return stored


def open_folder(folder):
    """Open the checkpoint in `folder`.

    Parameters
    ----------
    folder : str or path
        Holds `model.safetensors.index.json` and the shards it names, or else
        `model.safetensors`, or else exactly one `*.safetensors`.  The path of a
        file is refused: its config.json would be missing.

    Returns
    -------
    Tensors

    Raises
    ------
    CheckpointError
        If the folder or a file cannot be read or is not what it claims to be.
    """
    folder = os.fspath(folder)
    try:
        present = os.listdir(folder)
    except NotADirectoryError as error:
        raise _fault(folder, "is a file, expected a folder", f"give {os.path.dirname(folder) or '.'}") from error
    except (OSError, ValueError) as error:
        raise _fault(folder, f"cannot be opened ({getattr(error, 'strerror', error)})",
                     "expected the folder of a checkpoint, check the path") from error
    if _INDEX in present:
        return Tensors(folder, _open_shards(folder))
    files = sorted(name for name in present if name.endswith(".safetensors") and not name.startswith("."))
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if not files:
        raise _fault(folder, "no *.safetensors, expected model.safetensors, or shards and their index",
                     "download the checkpoint in this format")
    if len(files) > 1:
        raise _fault(folder, f"{len(files)} *.safetensors but no {_INDEX} that says which holds what: {_show(files)}",
                     "download the index too, or keep one file")
    return Tensors(folder, _open_file(os.path.join(folder, files[0])))
