"""Sessions on disk: one file, versioned, checksummed, replaced in one step.

    16 bytes   b"npinfer-sessions"
     8 bytes   N, little-endian
     N bytes   JSON: version, fingerprint of the model, wall time, and for each
               session its id, idle seconds, numbers of ids and of rows
    the rest   for each session its ids (int64) and, if the model is numeric,
               its rows (float32: n_layers, parts, n_heads, n_rows, and the width of a KVCache)
    32 bytes   BLAKE2b of all before

A file is believed only when its checksum, its version, the model and every
length are right.
"""

import json
import os
import tempfile
from hashlib import blake2b
from math import prod

import numpy as np

from npinfer.errors import CheckpointError

MAGIC = b"npinfer-sessions"
VERSION = 1
CHECKSUM_BYTES = 32
MAX_SECONDS = 1e12  # some thirty thousand years


def write_sessions(path, model, wall_s, sessions):
    """Write `sessions` (dicts of id, idle_s, ids, n_rows, rows) to `path`, or leave what is there as it was."""
    header = {
        "version": VERSION,
        "fingerprint": model.fingerprint().hex(),
        "wall_s": wall_s,
        "sessions": [
            {"id": s["id"], "idle_s": s["idle_s"], "n_ids": len(s["ids"]), "n_rows": s["n_rows"]} for s in sessions
        ],
    }
    text = json.dumps(header).encode()
    folder, name = os.path.split(os.path.abspath(path))
    handle, partial = tempfile.mkstemp(prefix=f"{name}.", suffix=".partial", dir=folder)  # each writer its own
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    try:
        with open(handle, "wb") as file:

            def write(data):
                file.write(data)
                digest.update(data)

            write(MAGIC + len(text).to_bytes(8, "little") + text)
            for session in sessions:
                write(session["ids"].tobytes())
                if model.numeric:
                    write(np.concatenate(session["rows"], axis=3).tobytes())
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def read_sessions(path, model):
    """The wall time at which `path` was written and its sessions, as `write_sessions` takes them; rows in one array."""

    def fault(what):
        return CheckpointError(f"{os.fspath(path)}: {what}; save the sessions again")

    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror}); give a file that save wrote") from None
    body = memoryview(data)[:-CHECKSUM_BYTES]
    start = len(MAGIC) + 8
    if len(data) < start + CHECKSUM_BYTES or body[: len(MAGIC)] != MAGIC:
        raise fault("is not a file of sessions")
    if blake2b(body, digest_size=CHECKSUM_BYTES).digest() != data[-CHECKSUM_BYTES:]:
        raise fault("is damaged or cut short, its checksum does not match")
    n_header = int.from_bytes(body[len(MAGIC) : start], "little")
    try:
        header = json.loads(bytes(body[start : start + n_header]))
        version = header["version"]
        if version != VERSION:
            raise fault(f"is of version {version}, expected {VERSION}")
        if header["fingerprint"] != model.fingerprint().hex():
            raise fault("holds sessions of another model, or of other formats or weights")
        at, sessions = start + n_header, []
        for entry in header["sessions"]:
            session, at = _session(entry, body, at, model)
            sessions.append(session)
        if len({session["id"] for session in sessions}) < len(sessions):
            raise ValueError("a session appears twice")
        wall_s = _seconds("wall_s", header["wall_s"], least=float("-inf"))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise fault(f"has a header that makes no sense ({error!r})") from None
    if at != len(body):
        raise fault(f"holds {len(body) - at} bytes more than its header says")
    return wall_s, sessions


def _seconds(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int | float) or not max(least, -MAX_SECONDS) <= value <= MAX_SECONDS:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _session(entry, body, at, model):
    """One session from its entry and the bytes at `at`, and where the next begins."""
    config, id, n_ids, n_rows = model.config, entry["id"], entry["n_ids"], entry["n_rows"]
    if type(id) not in (str, int) or type(n_ids) is not int or type(n_rows) is not int:
        raise ValueError(f"session {id!r} of {n_ids!r} ids and {n_rows!r} rows")
    if not 0 < n_rows <= n_ids <= len(body):
        raise ValueError(f"{n_rows} rows of {n_ids} ids")
    ids = np.frombuffer(body, "<i8", n_ids, at).copy()  # or the whole file would stay in memory
    at += ids.nbytes
    model.checked(ids)
    if ids.min() < 0:
        raise ValueError(f"token {ids.min()}")
    rows = None
    if model.numeric:
        n_parts, n_heads, _ = config.kv_shape
        shape = (config.n_layers, n_parts, n_heads, n_rows, model.new_cache().width)
        rows = np.frombuffer(body, np.float32, prod(shape), at).reshape(shape)
        at += rows.nbytes
    return {"id": id, "idle_s": _seconds("idle_s", entry["idle_s"], least=0), "ids": ids, "n_rows": n_rows, "rows": rows}, at
