"""What the tests of the caches share: a clock to turn, models small enough to run in full, and the plainest store.

`Held` is that store: a dict of histories, and a search over all of them for
the one to drop next.  A history is a tuple: a root's name, then the blocks
behind it, each a tuple of ids.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from costmodel.formulas import forward_counts
from npinfer import Counts, Ledger, ModelConfig, Precision, Transformer
from npinfer.blocks import BlockStore
from npinfer.formats import FORMATS, unheld
from npinfer.reports import CacheStats
from strategies import FP32, T1

ids = st.integers(1, 3)
# A prompt: how much of which one before it, and what follows; whether its start stays in use; seconds before.
requests = st.tuples(
    st.integers(0, 9), st.integers(0, 8), st.lists(ids, max_size=5), st.sampled_from([0, 0, 1]), st.integers(0, 2)
)  # fmt: skip


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now=0):
        self.now = now

    def __call__(self):
        return self.now


# ---- the plainest store that is right


@dataclass
class Entry:
    nbytes: int
    owner: object = None
    refs: int = 0
    last_use: int = 0  # number of the release, one more each
    released: float = 0


class Held:
    """Histories held, least recently used dropped first, children before parents."""

    def __init__(self, capacity, ttl):
        self.capacity, self.ttl, self.entries = capacity, ttl, {}
        self.n_releases = self.evicted = self.expired = 0

    @property
    def used(self):
        return sum([entry.nbytes for entry in self.entries.values()])

    @property
    def protected(self):
        return sum([entry.nbytes for entry in self.entries.values() if entry.refs])

    def longest(self, history):
        """The longest beginning of a history that is held."""
        n = 1
        while n < len(history) and history[: n + 1] in self.entries:
            n += 1
        return history[:n]

    def acquire(self, *histories):
        for history in histories:
            self.entries[history].refs += 1

    def release(self, histories, now):
        for history in reversed(histories):
            entry = self.entries[history]
            entry.refs -= 1
            self.n_releases += 1
            entry.last_use, entry.released = self.n_releases, now

    def idle_leaves(self):
        parents = {history[:-1] for history in self.entries}
        return [history for history, entry in self.entries.items() if entry.refs == 0 and history not in parents]

    def insert(self, history, nbytes, owner=None):
        assert history not in self.entries
        assert len(history) == 2 or history[:-1] in self.entries
        self.entries[history] = Entry(nbytes, owner, refs=1)

    def fits(self, nbytes):
        return self.capacity is None or self.protected + nbytes <= self.capacity

    def make_room(self, nbytes):
        """Those dropped, in order; None if what is in use leaves no such room.  An owner loses all or nothing."""
        if not self.fits(nbytes):
            return None
        dropped = []
        while self.capacity is not None and self.used + nbytes > self.capacity:
            first = min(self.idle_leaves(), key=lambda history: self.entries[history].last_use)
            owner = self.entries[first].owner
            gone = [first] if owner is None else [h for h, entry in self.entries.items() if entry.owner == owner]
            for history in sorted(gone, key=len, reverse=True):
                dropped.append(history)
                del self.entries[history]
        self.evicted += len(dropped)
        return dropped

    def expire(self, now):
        """Drop what has not been in use for `ttl` or longer."""
        dead = [] if self.ttl is None else [
            history for history, entry in self.entries.items() if entry.refs == 0 and now - entry.released >= self.ttl
        ]
        dead.sort(key=lambda history: self.entries[history].last_use)
        for history in dead:
            del self.entries[history]
        self.expired += len(dead)
        return dead

    def drop(self, history):
        """Remove the end of a chain, up to the first block in use or with a child."""
        while len(history) > 1 and history in self.idle_leaves():
            del self.entries[history]
            history = history[:-1]


def parents_of(history):
    """A history and all its beginnings that hold a block, first block first."""
    return [history[: n + 1] for n in range(1, len(history))]


def split(root, ids, size):
    """The history of ids in blocks of `size`, the last one partly filled."""
    ids = tuple([int(token) for token in ids])
    return (root, *[ids[at : at + size] for at in range(0, len(ids), size)])


def joined(history):
    return tuple([token for block in history[1:] for token in block])


# ---- the store under watch


class WatchedStore(BlockStore):
    """A store that fails at the moment it goes over its budget or below nothing."""

    def _get(self, name):
        return self.__dict__[name]

    def _set(self, name, value):
        assert 0 <= value
        assert self.capacity is None or value <= self.capacity, f"{name} is {value} of {self.capacity}"
        self.__dict__[name] = value

    used = property(lambda self: self._get("used"), lambda self, value: self._set("used", value))
    protected = property(lambda self: self._get("protected"), lambda self, value: self._set("protected", value))


def watched(cache):
    cache.store.__class__ = WatchedStore
    return cache


def history_of(block):
    blocks = []
    while block.parent is not None:
        blocks.append(tuple(np.frombuffer(block.ids, "<i8").tolist()))
        block = block.parent
    return (None, *reversed(blocks))


def check_store(store):
    """All that must be true of a store at any time; returns its blocks by history (root None)."""
    blocks = list(store)
    used = sum([block.nbytes for block in blocks])
    protected = sum([block.nbytes for block in blocks if block.refs > 0])
    assert (store.used, store.protected) == (used, protected)
    if store.capacity is not None:
        assert store.free >= 0
        assert store.free + (store.used - store.protected) + store.protected == store.capacity
    children = {}
    for block in blocks:
        assert block in store
        assert block.refs >= 0 and block.nbytes >= 0 and len(block) > 0
        assert block.parent.parent is None or block.parent in store
        assert block.refs <= block.parent.refs or block.parent.parent is None
        children.setdefault(id(block.parent), []).append(block)
    for block in blocks:
        assert block.parent.children[block.key] is block
        for node in (block, block.parent):
            assert sorted(map(id, node.children.values())) == sorted(map(id, children.get(id(node), ())))
    assert len(store) == len(blocks)
    return {history_of(block): block for block in blocks}


# ---- models, and what they give without a cache

WINDOW = ModelConfig(
    n_layers=2, d_model=12, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=10, vocab_size=32, sliding_window=4, name="window"
)
NARROW = ModelConfig(2, 8, 2, 6, 32, head_dim=4, sliding_window=1, name="window of one")
GROUPED = ModelConfig(3, 14, 6, 9, 32, n_kv_heads=3, head_dim=6, qkv_bias=True, name="grouped")
ONE_LAYER = ModelConfig(1, 16, 4, 24, 32, n_kv_heads=2, head_dim=4, name="one layer")
ONE_LAYER_WINDOW = ModelConfig(1, 16, 4, 24, 32, n_kv_heads=2, head_dim=4, sliding_window=5, name="one layer, window")
CONFIGS = {config.name: config for config in (T1, WINDOW, NARROW, GROUPED, ONE_LAYER, ONE_LAYER_WINDOW)}
ELEMENT_BYTES, SCALE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}, {"fp32": 0, "fp16": 0, "int8": 2}
# Rows that were rounded may be rounded the other way after another order of summation.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "int8": 0.1}


def model(name="T1", kv="fp32", numeric=True):
    return _model(name, kv, numeric)  # one object, however it was asked for


@lru_cache
def _model(name, kv, numeric):
    config, precision = CONFIGS[name], FP32 if kv == "fp32" else Precision("fp32", kv, "fp32")
    return Transformer.random(config, 3, precision) if numeric else Transformer.shape_only(config, precision)


def row_bytes(name, kv):
    """Of one token in one layer: K and V."""
    config = CONFIGS[name]
    return 2 * config.n_kv_heads * (config.head_dim * ELEMENT_BYTES[kv] + SCALE_BYTES[kv])


def loaded_bytes(name, kv, n_rows):
    """Of rows restored: all of them, or of a window layer those that can still be seen."""
    held = [n_rows if window is None else min(n_rows, window - 1) for window in CONFIGS[name].windows]
    return sum(held) * row_bytes(name, kv)


@lru_cache(maxsize=2**14)
def cold(name, kv, ids):
    """Without a cache: logits of the last position, `Counts`, and all rows (n_layers, 2, n_kv_heads, n, head_dim)."""
    cache = model(name, kv).new_cache()
    cache.keep_rows(0)
    with Ledger() as ledger:
        logits = model(name, kv).prefill(ids, cache)
    return logits, ledger.total(), cache.rows(0, len(ids))


def assert_cold(logits, name, kv, ids):
    np.testing.assert_allclose(logits, cold(name, kv, tuple(map(int, ids)))[0], rtol=0, atol=TOLERANCE[kv])


# ---- a cache against a dict of histories and full recomputation


class CacheAgainstHistories(RuleBasedStateMachine):
    """A numeric cache and a shape-only one in lockstep, beside what is right; `begin` them in an `initialize`.

    What a policy reuses, keeps and drops is said by its subclass, in `Held`'s words.
    """

    def begin(self, make, name, kv, n_tokens, size, ttl=None, tier="device", stretch=1):
        self.name, self.kv, self.size, self.tier, self.stretch, self.clock = name, kv, size, tier, stretch, Clock()
        self.token_bytes = CONFIGS[name].n_layers * row_bytes(name, kv)
        self.held = Held(None if n_tokens is None else max(n_tokens, size) * self.token_bytes, ttl)
        self.caches = [watched(make(model(name, kv, numeric), self.held.capacity)) for numeric in (True, False)]
        self.users = []  # [ids, private caches of both, starts of both or None, histories in use]
        self.prompts, self.payloads = [(1,)], {}
        self.hit = self.miss = self.refused = 0

    def prompt(self, base, cut, tail):
        """A prompt that shares a beginning with one of the last; `stretch` of each token."""
        tail = tuple([token for token in tail for _ in range(self.stretch)])
        ids = (self.prompts[-1 - base % len(self.prompts)][: cut * self.stretch] + tail)[: 12 * self.stretch] or (1,)
        self.prompts.append(ids)
        return ids

    @rule(several=st.lists(requests, min_size=1, max_size=5))
    def prefills(self, several):
        for *prompt, hold, seconds in several:
            self.clock.now += seconds
            self.prefill(self.prompt(*prompt), hold)

    def full(self, ids):
        return split(None, ids[: len(ids) - len(ids) % self.size], self.size)

    def starts(self, ids, n_reused, histories, n_evicted, hold):
        """Prefill with both caches; checks all that a start says of itself."""
        n = len(ids)
        with Ledger() as ledger:
            start = self.caches[0].prefill(list(ids))
        other = self.caches[1].prefill(np.array([ids]))
        self.hit += n_reused
        self.miss += n - n_reused
        self.users.append([ids, (start.cache, other.cache), (start, other), histories])
        report, loads = start.report, ledger.total(op="cache_load")
        assert (report.n_asked, report.n_reused, report.n_computed) == (n, n_reused, n - n_reused)
        assert report.saved == cold(self.name, self.kv, ids)[1] - ledger.total()
        assert all([type(count) is int for count in report.saved])
        assert report.flops_saved == report.saved.matmul_flops
        twin = model(self.name, self.kv)
        assert ledger.total() - loads == forward_counts(twin.config, twin.precision, 1, n_reused, n - n_reused)
        assert (len(ledger.forwards), ledger.total(phase="prefill")) == (1, ledger.total())
        loaded = loaded_bytes(self.name, self.kv, n_reused)
        assert loads == Counts(kv_bytes_read=loaded, kv_bytes_written=loaded)
        assert report.bytes_loaded == loaded
        assert report.transfer_bytes == (loaded if self.tier == "host" else 0)
        assert (report.approximate, report.n_evicted, report.nbytes) == (False, n_evicted, self.held.used)
        assert other.report == report
        assert_cold(start.logits, self.name, self.kv, ids)
        assert other.logits.shape == start.logits.shape == (1, 32)
        self.check_private(self.users[-1])
        if not hold:
            start = other = None
            self.release(-1, "release")

    def check_private(self, user):
        for cache in user[1]:
            assert (cache.length, cache.nbytes) == (len(user[0]), loaded_bytes(self.name, self.kv, len(user[0])))

    def user(self, number):
        return self.users[number % len(self.users)]

    @precondition(lambda self: self.users)
    @rule(number=st.integers(0, 9), tail=st.lists(ids, min_size=1, max_size=3))
    def append(self, number, tail):
        """Decode, or prefill several tokens, on what a start gave."""
        user = self.user(number)
        for twin, cache in zip([model(self.name, self.kv, numeric) for numeric in (True, False)], user[1]):
            logits = twin.decode(tail, cache) if len(tail) == 1 else twin.prefill(tail, cache)
            if twin.numeric:
                assert_cold(logits, self.name, self.kv, (*user[0], *tail))
        user[0] += tuple(tail)
        self.check_private(user)

    @precondition(lambda self: self.users)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        ids, caches, _, _ = self.user(number)
        self.users.append([ids, tuple([cache.fork() for cache in caches]), None, []])

    @precondition(lambda self: self.users)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["release", "leave", "forget"]))
    def release(self, number, how):
        """End a use, by name, by leaving, or by letting go of the start; its private cache stays."""
        user = self.user(number)
        for start in user[2] or ():
            if how == "leave":
                with start:
                    pass
            if how != "forget":
                start.release()
        user[2] = start = None
        self.held.release(user[3], self.clock())
        user[3] = []
        self.users = self.users[-6:] if not any([user[3] for user in self.users[:-6]]) else self.users

    @invariant()
    def caches_hold_what_they_should(self):
        if not hasattr(self, "caches"):
            return
        held = self.held
        held.expire(self.clock())
        free = None if held.capacity is None else held.capacity - held.used
        expected = CacheStats(
            free, held.used - held.protected, held.protected, self.hit, self.miss, held.evicted, held.expired, self.refused
        )
        for cache in self.caches:
            assert cache.stats == expected
            assert cache.nbytes == held.used
            blocks = check_store(cache.store)
            assert {history: block.refs for history, block in blocks.items()} == {
                history: entry.refs for history, entry in held.entries.items()
            }
        assert all([block.payload is None for block in blocks.values()])
        check_payloads(self.caches[0], self.name, self.kv, self.payloads)


def check_payloads(cache, name, kv, seen):
    """What is held is what the whole history would give, is never changed, and keeps nothing else in memory."""
    config = CONFIGS[name]
    for history, block in check_store(cache.store).items():
        known, copy = seen.get(id(block), (None, None))
        rows = block.payload
        if known is block:
            np.testing.assert_array_equal(rows, copy)
            continue
        width = config.head_dim + (kv == "int8")  # codes, and the scale of each row
        assert rows.shape == (config.n_layers, 2, config.n_kv_heads, len(block), width)
        assert rows.base is None and rows.dtype == np.float32 and not rows.flags.writeable
        assert block.nbytes == len(block) * config.n_layers * row_bytes(name, kv)
        whole = cold(name, kv, joined(history))[2]
        held, expected = [unheld(x, FORMATS[kv]) for x in (rows, whole[..., -len(block) :, :])]
        np.testing.assert_allclose(held, expected, rtol=0, atol=TOLERANCE[kv])
        seen[id(block)] = block, rows.copy()
