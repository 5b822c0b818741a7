"""The store of blocks against a dict of histories and a search through all of it.

`python tests/test_blocks.py 1000000` runs that many random operations.
"""

import random
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import npinfer
from cachelib import Clock, Held, WatchedStore, check_store, history_of, model, parents_of
from npinfer import CacheError, InputError, PrefixCache, PromptCache, blocks
from npinfer.blocks import Block, as_ids, block_key, common_prefix, n_bytes, root_key

OWNERS = ("a", "b", "c")  # each has one chain, used and given back as a whole
MAX_BLOCKS = 4  # of a chain


def stored(block):
    """A tuple of ids as a store takes it."""
    return np.array(block, "<i8").tobytes()


def size(block):
    """Any number of bytes will do, as long as blocks differ in it; one of them holds none."""
    return sum(block) + 3 * len(block) - 4


class StoreAndHeld:
    """A store and the plain one, through the same operations; what they answer must be the same."""

    def __init__(self, capacity, ttl, clock):
        self.clock, self.store, self.held = clock, WatchedStore(capacity, ttl, clock), Held(capacity, ttl)
        self.roots = {name: Block(root_key(b"model", repr(name).encode())) for name in (None, *OWNERS)}
        self.uses = []  # (root, chain of blocks, their histories)
        self.histories = {}  # of every block that was ever inserted and is still there, by its id

    def match(self, root, wanted):
        """The longest chain of blocks held, which is the one the plain store has."""
        chain, history = [], self.held.longest((root, *wanted))
        for block in wanted:
            found = self.store.child(chain[-1] if chain else self.roots[root], stored(block))
            if found is None:
                break
            chain.append(found)
        assert tuple([self.histories[id(block)] for block in chain]) == tuple(parents_of(history))
        return chain, history

    def use(self, root, wanted, insert):
        """Begin a use of what is held of a chain, and insert the rest if there is room."""
        if root is not None:
            if any(root == used for used, _, _ in self.uses):
                return
            own = max([h for h in self.held.entries if h[0] == root], key=len, default=(root,))
            wanted = (*own[1:], *wanted)[:MAX_BLOCKS]
        chain, history = self.match(root, wanted)
        self.store.acquire(chain)
        self.held.acquire(*parents_of(history))
        rest = wanted[len(chain) :] if insert else ()
        if self.make_room(sum(map(size, rest))):
            for block in rest:
                parent = chain[-1] if chain else self.roots[root]
                new = self.store.insert(parent, stored(block), None, size(block), root)
                history = (*history, block)
                self.held.insert(history, size(block), root)
                self.histories[id(new)] = history
                chain.append(new)
        self.uses.append((root, chain, parents_of(history)))

    def release(self, number):
        if self.uses:
            _, chain, histories = self.uses.pop(number % len(self.uses))
            self.store.release(chain, self.clock())
            self.held.release(histories, self.clock())

    def make_room(self, nbytes):
        """Whether there is room now."""
        expected = self.held.make_room(nbytes)
        dropped = self.store.make_room(nbytes)
        assert (dropped is None) == (expected is None)
        self.forget(dropped or [], expected or [])
        return dropped is not None

    def expire(self):
        self.forget(self.store.expire(), self.held.expire(self.clock()))

    def drop(self, number):
        """Drop the end of any chain."""
        ends = list(self.held.entries)
        if ends:
            history = ends[number % len(ends)]
            chain, _ = self.match(history[0], history[1:])
            assert self.store.lineage(chain[-1]) == chain
            self.held.drop(history)
            self.store.drop(chain)
            for block in chain:
                if block not in self.store:
                    del self.histories[id(block)]

    def forget(self, dropped, expected):
        assert [self.histories.pop(id(block)) for block in dropped] == expected
        assert not any([block in self.store for block in dropped])

    def check_totals(self):
        store, held = self.store, self.held
        assert (store.used, store.protected, len(store)) == (held.used, held.protected, len(held.entries))
        assert (store.evicted, store.expired) == (held.evicted, held.expired)
        assert store.free is None or store.free + (store.used - store.protected) + store.protected == store.capacity

    def check(self):
        self.check_totals()
        found = check_store(self.store)
        assert len(found) <= len(self.held.entries)  # chains of different roots may have the same ids
        for block in self.store:
            history = self.histories[id(block)]
            assert history[1:] == history_of(block)[1:]
            entry = self.held.entries[history]
            assert (block.refs, block.nbytes, block.owner) == (entry.refs, entry.nbytes, entry.owner)
            assert entry.refs or block.released_s == entry.released


ids = st.integers(1, 3)
chains = st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=MAX_BLOCKS).map(tuple)
roots = st.sampled_from([None, None, None, *OWNERS])


class StoreAgainstHistories(RuleBasedStateMachine):
    @initialize(capacity=st.none() | st.integers(0, 60), ttl=st.none() | st.integers(1, 8))
    def make(self, capacity, ttl):
        self.clock = Clock()
        self.both = StoreAndHeld(capacity, ttl, self.clock)

    @rule(root=roots, chain=chains, insert=st.booleans())
    def use(self, root, chain, insert):
        self.both.use(root, chain, insert)

    @precondition(lambda self: self.both.uses)
    @rule(number=st.integers(0, 9))
    def release(self, number):
        self.both.release(number)

    @rule(nbytes=st.integers(0, 60))
    def evict(self, nbytes):
        self.both.make_room(nbytes)

    @rule(seconds=st.integers(0, 9), expire=st.booleans())
    def wait(self, seconds, expire):
        self.clock.now += seconds
        if expire:
            self.both.expire()

    @rule(number=st.integers(0, 99))
    def drop(self, number):
        self.both.drop(number)

    @invariant()
    def the_store_is_what_the_plain_one_is(self):
        if hasattr(self, "both"):
            self.both.check()


TestStoreAgainstHistories = StoreAgainstHistories.TestCase
TestStoreAgainstHistories.settings = settings(max_examples=120, stateful_step_count=40)


def run_at_random(n_operations, seed=0, check_every=1000):
    """Random operations on a store of blocks without arrays; totals are checked after each, all of it now and then."""
    choose = random.Random(seed)
    clock = Clock()
    both = StoreAndHeld(160, 12, clock)
    for number in range(n_operations):
        kind = choose.random()
        if kind < 0.4:
            root = choose.choice(OWNERS) if choose.random() < 0.2 else None
            chain = [tuple(choose.choices((1, 2, 3), k=choose.randint(1, 2))) for _ in range(choose.randint(1, MAX_BLOCKS))]
            both.use(root, tuple(chain), insert=choose.random() < 0.8)
        elif kind < 0.8 or len(both.uses) > 12:
            both.release(choose.randrange(16))
        elif kind < 0.85:
            both.make_room(choose.randrange(100))
        elif kind < 0.9:
            both.drop(choose.randrange(100))
        else:
            clock.now += choose.randrange(12)
            both.expire()
        both.check_totals()
        if number % check_every == 0:
            both.check()
    while both.uses:
        both.release(0)
    both.check()
    assert both.store.protected == 0
    return both.store


@pytest.mark.parametrize("seed", range(2))
def test_five_thousand_random_operations(seed):
    store = run_at_random(5000, seed, check_every=20)
    assert store.evicted > 300 and store.expired > 100  # the run went where it should


@pytest.mark.parametrize("seed", range(5))
def test_c31_five_hundred_operations_checked_one_by_one(seed):
    run_at_random(500, seed, check_every=1)


# ---- order, use, expiry


def store_with(capacity=None, ttl=None, clock=None, chain=((1,), (2,), (3,))):
    """A store with one chain in use, ten bytes a block; store, root, chain."""
    store, root = WatchedStore(capacity, ttl, clock or Clock()), Block(b"root")
    found = []
    for block in chain:
        found.append(store.insert(found[-1] if found else root, stored(block), None, 10))
    return store, root, found


def test_c28_the_tail_goes_first():
    store, root, (b1, b2, b3) = store_with(30)
    store.release([b1, b2, b3], 0)
    assert store.make_room(10) == [b3]
    store.insert(root, stored((9,)), None, 10)
    assert [store.child(root, stored((1,))), store.child(b1, stored((2,)))] == [b1, b2]
    assert store.child(b2, stored((3,))) is None


def test_c29_what_is_in_use_stays_with_all_before_it():
    store, root, (a, b) = store_with(20, chain=((1,), (2,)))
    assert store.make_room(20) is None and store.evicted == 0 and len(store) == 2
    assert store.make_room(1) is None and store.evicted == 0
    store.release([a, b], 0)
    assert store.make_room(20) == [b, a]
    assert (store.used, store.evicted, len(root.children)) == (0, 2, 0)


def test_a_refused_room_drops_nothing():
    """Half of what is wanted could be had; none of it is taken."""
    store, root, chain = store_with(30)
    store.acquire(chain[:1])
    store.release(chain, 0)
    assert store.make_room(21) is None
    assert len(store) == 3
    assert store.make_room(20) == [chain[2], chain[1]]


@pytest.mark.parametrize("after, alive", [(9.99, True), (10, False), (10.01, False)])
def test_a_block_is_dead_at_exactly_its_ttl(after, alive):
    clock = Clock()
    store, root, chain = store_with(ttl=10, clock=clock)
    clock.now = 100
    assert store.expire() == []  # in use, however long
    store.release(chain, clock())
    clock.now += after
    assert store.expire() == ([] if alive else chain[::-1])
    assert store.expired == (0 if alive else 3)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_time_to_live_that_cannot_be_meant_is_refused(ttl_s):
    with pytest.raises(InputError, match="ttl_s is .* above 0"):
        WatchedStore(None, ttl_s, Clock())


def test_another_chain_of_the_same_ids_is_another_chain():
    """C22: a block matches behind its own history only; and [1, 2], [3] is not [1], [2, 3]."""
    store, root, chain = store_with(chain=((1, 2), (3,)))
    assert store.child(root, stored((3,))) is None
    assert store.child(Block(b"other root"), stored((1, 2))) is None
    assert store.child(root, stored((1,))) is None
    assert store.insert(root, stored((1, 2)), None, 10) is None  # already there
    assert (len(store), store.used) == (2, 20)


# ---- keys


def test_keys_tell_all_histories_apart():
    """C21: ids that Python's hash or joined text takes for each other, in any two blocks."""
    traps = [(5, -1), (5, -2), (1,), (1, 0), (0, 1), (2**62,), (1, 23), (12, 3), (123,), (256,), (1 << 32,), (-1,), ()]
    parents = [root_key(b"model", b""), root_key(b"model", b"salt"), root_key(b"other", b""), root_key(b"", b"model")]
    parents += [block_key(parents[0], stored(trap)) for trap in traps]
    keys = {block_key(parent, stored(trap)) for parent in parents for trap in traps}
    assert len(keys) == len(parents) * len(traps)
    assert root_key(b"cd", b"ab") != root_key(b"bcd", b"a")  # the salt does not run on into the fingerprint


def test_keys_are_the_same_in_every_process():
    """A known answer: blake2b of the parent's key and little-endian ids of 8 bytes."""
    from hashlib import blake2b

    expected = blake2b(b"parent" + bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]), digest_size=32).digest()
    assert block_key(b"parent", stored((1, 258))) == expected


@pytest.mark.parametrize("make", [PrefixCache, lambda model: PromptCache(model, block_size=2)])
def test_c21_a_collision_is_a_miss(monkeypatch, make):
    """All blocks have one key, so that the first is kept and found, and no other is taken for it."""
    monkeypatch.setattr(blocks, "block_key", lambda parent_key, ids: b"the same for all")
    cache, reused = make(model()), []
    prompts = [1, 2, 3, 4, 5], [6, 7, 8, 9], [3, 4, 5], [1, 2, 1, 2, 1, 2, 9], [1, 2, 9, 9, 9]
    for prompt in prompts:
        if isinstance(cache, PrefixCache):
            cache.add(prompt)
        start = cache.prefill(prompt)
        np.testing.assert_allclose(start.logits, model().prefill(prompt, model().new_cache()), atol=1e-5)
        check_store(cache.store)
        reused.append(start.report.n_reused)
    assert reused == ([4, 0, 0, 2, 2] if isinstance(cache, PrefixCache) else [0, 0, 0, 2, 2])


def test_c22_the_parent_is_part_of_the_key():
    cache = PromptCache(model(), block_size=4)
    cache.prefill([1, 2, 3, 4, 9, 9, 9, 9, 1]).release()
    for prompt, reused in [([5, 6, 7, 8, 9, 9, 9, 9, 1], 0), ([9, 9, 9, 9, 1], 0), ([1, 2, 3, 4, 9, 9, 9, 9, 1], 8)]:
        with PromptCache.prefill(cache, prompt) as start:
            assert start.report.n_reused == reused


def test_a_fingerprint_tells_models_apart():
    from dataclasses import replace

    from npinfer import RopeScaling, Transformer
    from strategies import FP32, T1

    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=16)
    configs = [T1, replace(T1, rope_theta=500.0), replace(T1, rope_scaling=scaling), replace(T1, sliding_window=4)]
    models = [Transformer.random(config, seed, FP32) for config in configs for seed in (0, 1)]
    models += [Transformer.random(T1, 0, npinfer.Precision("fp32", kv, "fp32")) for kv in ("fp16", "bf16")]
    models += [Transformer.random(T1, 0, npinfer.Precision(weights, "fp32", "fp32")) for weights in ("fp16", "int8")]
    one_off = Transformer.random(T1, 0, FP32)
    next(iter(one_off.weights.layers))[2].attention.o_proj.data.rows[0, 0] += 1
    models += [one_off, Transformer.shape_only(T1, FP32)]
    assert len({m.fingerprint() for m in models}) == len(models)
    assert Transformer.random(replace(T1, name="other"), 0, FP32).fingerprint() == models[0].fingerprint()


# ---- what callers give


@pytest.mark.parametrize("value, nbytes", [
    (1024, 1024), (8e9, 8_000_000_000), ("1024", 1024), ("8 GB", 8 * 10**9), ("8 GiB", 8 * 2**30), ("8GiB", 8 * 2**30),
    (" 1.5 kB ", 1500), ("3 B", 3), ("1 KiB", 1024), ("2 MB", 2_000_000), ("2 MiB", 2**21), ("1 TB", 10**12),
    ("1 TiB", 2**40), (np.int64(7), 7), (0, 0), (2**53 + 3, 2**53 + 3),
    ("0.3 GiB", 322_122_547),
])
def test_bytes_from_numbers_and_text(value, nbytes):
    found = n_bytes("capacity_bytes", value)
    assert found == nbytes and isinstance(found, int)


def test_c51_a_unit_is_what_it_says():
    assert n_bytes("budget", "1 GiB") // 128 == 8_388_608
    assert n_bytes("budget", "1 GB") // 128 == 7_812_500


@pytest.mark.parametrize("value", [
    -1, "-1", "-8 GB", float("nan"), "nan", float("inf"), "inf GB", "", " ", "GB", True, False, None, "many", "1e400",
    2**63, [8], b"8 GB",
])
def test_bytes_that_cannot_be_meant_are_refused(value):
    with pytest.raises(InputError, match="capacity_bytes is"):
        n_bytes("capacity_bytes", value)


@pytest.mark.parametrize("unit", ["gb", "Gb", "GBs", "XB", "PB", "bytes", "GiBB", "kiB", "K", "blocks", "GB GB"])
def test_an_unknown_unit_is_refused(unit):
    with pytest.raises(InputError, match=f"'8 {unit}'.* expected .*GiB"):
        n_bytes("capacity_bytes", f"8 {unit}")


@pytest.mark.parametrize("capacity", [0, 127, "0.1 kB", "100"])
def test_a_budget_below_one_block_is_refused(capacity):
    with pytest.raises(CacheError, match="room for one block at least: 1 tokens of 128 B are 128"):
        PromptCache(model(), block_size=1, capacity_bytes=capacity)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [[1, 2, 3]], (1, 2, 3), np.array([1, 2, 3], np.uint8), range(1, 4)])
def test_ids_are_of_fixed_width(tokens):
    ids = as_ids(tokens)
    assert ids.dtype == np.dtype("<i8") and ids.tolist() == [1, 2, 3]
    assert ids.tobytes() == b"".join([token.to_bytes(8, "little") for token in (1, 2, 3)])


def test_ids_are_a_copy():
    tokens = np.array([1, 2, 3], "<i8")
    ids = as_ids(tokens)
    tokens[0] = 9
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("tokens", [
    [], [[]], (), [[1, 2], [3, 4]], [[1], [2, 3]], 5, [1.0, 2.0], [True, False], "text", ["a"], None, [2**64], {1: 2},
    [[[1, 2]]], [1, None], np.array([2**63], np.uint64),
])
def test_ids_that_are_no_sequence_of_integers_are_refused(tokens):
    with pytest.raises(InputError, match="tokens are .* expected one sequence of integers, at least one"):
        as_ids(tokens)


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix_is_where_two_lists_part(one, other):
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_prefix(stored(tuple(one)), stored(tuple(other))) == expected


if __name__ == "__main__":
    n_operations, began = int(sys.argv[1]), time.perf_counter()
    store = run_at_random(n_operations)
    print(
        f"{n_operations} operations, {store.evicted} blocks evicted, {store.expired} expired, none broken, "
        f"{time.perf_counter() - began:.0f} s"
    )
