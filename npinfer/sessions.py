"""The session cache: a dialogue's KV kept from turn to turn, and from process to process.

Each session is one chain of blocks behind a root of its own, evicted and
expired whole.  After generating N tokens it holds prompt + N - 1 rows: the
last token was never forwarded, and its id is kept for the next turn.

Read `npinfer.reuse` first.  `SessionCache` finds sessions, `Session` runs
turns, `npinfer.sessionfile` is what they look like on disk.
"""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from npinfer.blocks import BlockStore, common_prefix
from npinfer.checks import whole
from npinfer.errors import CacheError, InputError
from npinfer.generate import decode_greedily
from npinfer.ledger import forward
from npinfer.reports import CacheReport
from npinfer.reuse import Cache


@dataclass
class _State:
    """What is held of one session.

    Attributes
    ----------
    ids : int64 array
        All seen; the last one generated has no row.
    chain : list of Block
        Their rows.  Used, evicted and expired as a whole: each block has one
        reference while the session has users, and none otherwise.
    n_users : int
        Calls in progress and starts not yet released.
    busy : bool
        Whether a call is in progress.
    """

    id: object
    root: object
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, "<i8"))
    chain: list = field(default_factory=list)
    n_users: int = 0
    busy: bool = False

    @property
    def n_rows(self):
        return sum(map(len, self.chain))


@dataclass(frozen=True)
class SessionTurn:
    """What `Session.generate` returns.

    Attributes
    ----------
    tokens : int array (1, n_output) or None
        None for a shape-only model.
    report : CacheReport
        Of the prefill; what decoding adds is the same with and without the cache.
    """

    tokens: np.ndarray | None
    report: CacheReport


class SessionCache(Cache):
    """Dialogues of several turns, each computing only what is new.

    Parameters
    ----------
    wall_clock : callable
        Seconds since the epoch; used in what is written to disk, and nowhere else.
    model, capacity_bytes, ttl_s, clock, tier
        See `npinfer.reuse.Cache`.
    """

    def __init__(
        self, model, capacity_bytes=None, ttl_s=None, clock=time.monotonic, wall_clock=time.time, tier="device"
    ):  # fmt: skip
        super().__init__(model, capacity_bytes, ttl_s, clock, tier)
        self._wall_clock = wall_clock
        self._states = {}

    def session(self, id):
        """The session called `id` (text or a whole number); a new one begins with its first call."""
        if type(id) not in (str, int) or (type(id) is int and id.bit_length() > 256):
            raise InputError(f"session id is {type(id).__name__}, expected text or a whole number of at most 256 bits")
        return Session(self, id)

    def __contains__(self, id):
        with self._lock:
            self._settle()
            return id in self._states and bool(self._states[id].chain)

    def _begin(self, id, ids):
        """Under the lock: take the session for one call; its state, and how many rows match."""
        self._settle()
        state = self._states.get(id) or _State(id, self._root(repr(id).encode()))
        if state.busy:
            raise CacheError(f"session {id!r} is in a call already; a session takes one at a time")
        self._states.pop(id, None)
        self._states[id] = state  # in the order of their last calls
        state.busy = True
        if state.n_users == 0:
            self.store.acquire(state.chain)
        state.n_users += 1
        n_matched = common_prefix(state.ids.tobytes(), ids[:-1].tobytes())
        return state, min(n_matched, state.n_rows)

    def _finish(self, state, when_s):
        state.n_users -= 1
        if state.n_users == 0:
            self.store.release(state.chain, when_s)
            self._forget_empty(state)

    def _forget_empty(self, state):
        if not state.chain and not state.n_users and self._states.get(state.id) is state:
            del self._states[state.id]

    def _replace(self, state, n_kept, pieces, ids):
        """Under the lock: hold `pieces` behind the first `n_kept` blocks instead of what diverged from them.

        Returns
        -------
        list of Block or None
            Those dropped to make room; None, with the session as it was, if it does not fit.
        """
        gone = state.chain[n_kept:]
        nbytes = sum([len(piece) // 8 for piece, _ in pieces]) * self.token_bytes
        total = n_kept * self.block_size * self.token_bytes + nbytes
        if not self.store.could_hold(total) or not self.store.has_room(nbytes, without=gone):
            self._refused += 1
            return None
        self.store.release(gone, self.store.clock())
        self.store.drop(gone)
        state.chain, state.ids = state.chain[:n_kept], ids
        return self._keep(state.root, state.chain, n_kept, pieces, owner=state.id)

    def _forget(self, dropped):
        for id in {block.owner for block in dropped}:
            self._states.pop(id, None)

    def save(self, path):
        """Write all sessions to one file, which is replaced only once the new one is complete.

        Other uses of the cache wait until it is written.

        Raises
        ------
        CacheError
            If a session is in a call.
        OSError
            If the file cannot be written; an older one is as it was.
        """
        from npinfer.sessionfile import write_sessions

        with self._lock:
            self._settle()
            self._refuse_busy("save")
            now_s = self.store.clock()
            sessions = [
                {
                    "id": id,
                    "idle_s": 0.0 if state.chain[-1].refs else now_s - state.chain[-1].released_s,
                    "ids": state.ids,
                    "n_rows": state.n_rows,
                    "rows": [block.payload for block in state.chain],
                }
                for id, state in self._states.items()
                if state.chain
            ]
            write_sessions(path, self.model, self._wall_clock(), sessions)

    def load(self, path):
        """Hold the sessions of a file instead of those held now.

        What has expired meanwhile is left out; of what goes over the budget
        the most recently used are kept.

        Raises
        ------
        CheckpointError
            If the file is damaged, of another version or of another model; nothing is changed.
        CacheError
            If a session is in a call.
        """
        from npinfer.sessionfile import read_sessions

        wall_s, sessions = read_sessions(path, self.model)
        # A wall clock that was set back makes nothing younger than it was.
        away_s = max(0.0, self._wall_clock() - wall_s)
        with self._lock:
            self._settle()
            self._refuse_busy("load")
            old, taken = self.store, 0
            young = [session for session in sessions if old.ttl_s is None or session["idle_s"] + away_s < old.ttl_s]
            young.reverse()  # of two that idled as long, the one called later is the more recent
            young.sort(key=lambda session: session["idle_s"])
            fitting = []
            for session in young:
                nbytes = session["n_rows"] * self.token_bytes
                if old.capacity is not None and nbytes > old.capacity:
                    continue  # it would have been refused here
                taken += nbytes
                if old.capacity is not None and taken > old.capacity:
                    break
                fitting.append(session)
            store, states = BlockStore(old.capacity, old.ttl_s, old.clock), {}
            store.evicted, store.expired = old.evicted, old.expired
            for session in reversed(fitting):  # least recently used first, so that it is the first to go
                state = self._adopted(session, store, store.clock() - away_s - session["idle_s"])
                if state.chain:
                    states[state.id] = state
            self.store, self._states, self._ended = store, states, deque()  # uses of the old store end there

    def _adopted(self, session, store, released_s):
        """The state of a session read from a file, its rows put into `store`."""
        state = _State(session["id"], self._root(repr(session["id"]).encode()), session["ids"])
        text, n_rows, size = session["ids"].tobytes(), session["n_rows"], self.block_size
        for at in range(0, n_rows, size):
            stop = min(at + size, n_rows)
            rows = None
            if self.model.numeric:
                rows = session["rows"][..., at:stop, :].copy()
                rows.flags.writeable = False
            parent = state.chain[-1] if state.chain else state.root
            nbytes = (stop - at) * self.token_bytes
            block = store.insert(parent, text[8 * at : 8 * stop], rows, nbytes, state.id)
            if block is None:  # another history has this key, and what hangs on it cannot be kept either
                break
            state.chain.append(block)
        store.release(state.chain, released_s)
        return state

    def _refuse_busy(self, what):
        busy = [id for id, state in self._states.items() if state.busy]
        if busy:
            raise CacheError(f"{what}: session {busy[0]!r} is in a call; wait until it returns")


class Session:
    """One dialogue of a `SessionCache`; a name, not a holder: what it names may be evicted."""

    def __init__(self, sessions, id):
        self.sessions, self.id = sessions, id

    def prefill(self, full_prompt):
        """Prefill the whole dialogue so far, reusing what the session has seen of it; `CachedStart`."""
        start, _ = self._run(full_prompt, 1)
        return start

    def generate(self, full_prompt, n_output):
        """As `prefill`, then decode `n_output` tokens greedily and keep their rows too; `SessionTurn`."""
        start, tokens = self._run(full_prompt, whole("n_output", n_output), sampled=True)
        start.release()
        return SessionTurn(tokens, start.report)

    def _run(self, full_prompt, n_output, sampled=False):
        sessions = self.sessions
        ids = sessions._ids(full_prompt)
        with sessions._lock:
            state, n_matched = sessions._begin(self.id, ids)
        end_use = sessions._ender(state)
        try:
            n_kept = n_matched // sessions.block_size
            matched = state.chain[: -(-n_matched // sessions.block_size)]
            seen, tokens = ids, None
            with forward("prefill"):
                logits, cache, warm = sessions._compute(ids, matched, n_matched)
                if sampled:
                    tokens = decode_greedily(sessions.model, logits, cache, n_output)
                    generated = np.zeros(n_output) if tokens is None else tokens[0]
                    seen = np.concatenate([ids, generated]).astype("<i8")
            pieces = sessions._copied(seen[: cache.length], n_kept, cache, partly_filled=True)
            with sessions._lock:
                sessions._settle()  # what was given back meanwhile is room
                dropped = sessions._replace(state, n_kept, pieces, seen)
                report = sessions._report(ids, n_matched, warm, len(dropped or ()))
        except BaseException:
            end_use()
            raise
        finally:
            state.busy = False
        if not state.chain:  # refused, and nothing was held before: there is nothing to go on using
            end_use()
            end_use = _nothing
        return sessions._started(ids, logits, cache, report, end_use), tokens


def _nothing():
    """What ends no use."""
