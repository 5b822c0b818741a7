"""The prefix cache and the prompt cache against histories in a dict, and against runs without a cache."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from cachelib import (
    CONFIGS, CacheAgainstHistories, Clock, WatchedStore, assert_cold, check_payloads, check_store, cold, joined,
    loaded_bytes, model, parents_of, requests, row_bytes, split, watched,
)  # fmt: skip
from intercept import replace_operation
from npinfer import CacheError, InputError, Ledger, PrefixCache, PromptCache, Transformer, UnknownName, generate, kvcache, ops
from strategies import FP32

names = st.sampled_from(["T1", "window", "window of one", "grouped"])
formats = st.sampled_from(["fp32", "fp32", "fp16", "int8"])
budgets = st.sampled_from([None, 5, 7, 10, 13, 20])  # tokens
tiers = st.sampled_from(["device", "host"])


@pytest.fixture(autouse=True, scope="module")
def buffers_that_move():
    """Rows of a window are let go of as early as they may be, so that one that is still needed is missed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache, "GROWTH_ROWS", 1)
        yield


class PromptCacheAgainstHistories(CacheAgainstHistories):
    """Full blocks, behind the same history only; the longest chain of them that is held."""

    @initialize(name=names, kv=formats, n_tokens=budgets, size=st.integers(1, 4), ttl=st.sampled_from([None, 2, 5]), tier=tiers)
    def make(self, name, kv, n_tokens, size, ttl, tier):
        def cache(model, capacity):
            return PromptCache(model, size, capacity, ttl, self.clock, tier=tier)

        self.begin(cache, name, kv, n_tokens, size, ttl, tier)

    def prefill(self, ids, hold):
        held = self.held
        held.expire(self.clock())
        matched = held.longest(self.full(ids[:-1]))
        whole = self.full(ids)
        uses = parents_of(held.longest(whole))
        held.acquire(*uses)
        new = parents_of(whole)[len(uses) :]
        n_bytes = len(joined(whole)) * self.token_bytes
        dropped = None
        if held.capacity is None or n_bytes <= held.capacity:
            dropped = held.make_room(sum([len(history[-1]) for history in new]) * self.token_bytes)
        if dropped is None:
            self.refused += 1
            new = []
        for history in new:
            held.insert(history, len(history[-1]) * self.token_bytes)
        self.starts(ids, len(joined(matched)), uses + new, len(dropped or ()), hold)

    @rule(request=requests, n_calls=st.integers(1, 4))
    def fail(self, request, n_calls):
        """A prefill that ends in an error has touched what it matched, and nothing else."""
        ids = self.prompt(*request[:3])
        uses = parents_of(self.held.longest(self.full(ids[:-1])))
        self.held.acquire(*uses)
        for cache in self.caches:
            with failing(cache.model, "linear", n_calls), pytest.raises(ZeroDivisionError):
                cache.prefill(ids)
        self.held.release(uses, self.clock())


class PrefixCacheAgainstHistories(CacheAgainstHistories):
    """Entries down to their last token; the longest common prefix with any that is held."""

    @initialize(name=names, kv=formats, n_tokens=budgets, size=st.sampled_from([2, 3, 16]), tier=tiers)
    def make(self, name, kv, n_tokens, size, tier):
        def cache(model, capacity):
            cache = PrefixCache(model, capacity, tier)
            cache.block_size = size  # so that short prompts have chains of several
            return cache

        stretch = 6 if size == 16 else 1
        self.begin(cache, name, kv, n_tokens and n_tokens * stretch, size, tier=tier, stretch=stretch)

    def match(self, ids):
        """Histories in use and tokens matched; of two blocks that share as much, the one that came first."""
        at = self.held.longest(self.full(ids))
        rest = ids[len(joined(at)) :]
        shared = {history: common(history[-1], rest) for history in self.held.entries if history[:-1] == at}
        most = max(shared.values(), default=0)
        best = [history for history, n in shared.items() if n == most > 0]
        assert len(joined(at)) + most == max([common(joined(history), ids) for history in self.held.entries], default=0)
        return parents_of(at) + best[:1], len(joined(at)) + most

    @rule(request=requests)
    def add(self, request):
        ids, held = self.prompt(*request[:3]), self.held
        uses, n_matched = self.match(ids)
        n_full = n_matched // self.size
        new = parents_of(split(None, ids, self.size))[n_full:] if n_matched < len(ids) else []
        uses = uses[:n_full] if new else uses  # of what only a part is shared, nothing is used
        n_bytes, dropped = len(ids) * self.token_bytes, None
        if held.capacity is None or n_bytes <= held.capacity:
            held.acquire(*uses)
            dropped = held.make_room(sum([len(history[-1]) for history in new]) * self.token_bytes)
            new = [] if dropped is None else new
            for history in new:
                held.insert(history, len(history[-1]) * self.token_bytes)
            for history in self.continued_by(new[0]) if new else []:
                held.drop(history)
            held.release(uses + new, self.clock())
        for cache in self.caches:
            if dropped is None:
                with pytest.raises(CacheError, match=f"needs {n_bytes} bytes.* budget"):
                    cache.add(ids)
            else:
                assert cache.add(ids) == n_bytes
        self.refused += dropped is None

    def continued_by(self, new):
        """Blocks that are held at the place of a new one and are its beginning; those that nobody uses are replaced."""
        beside = [history for history in self.held.entries if history[:-1] == new[:-1] and history != new]
        return [history for history in beside if new[-1][: len(history[-1])] == history[-1]]

    def prefill(self, ids, hold):
        uses, n_reused = self.match(ids[:-1])
        self.held.acquire(*uses)
        self.starts(ids, n_reused, uses, 0, hold)


TestPromptCache = PromptCacheAgainstHistories.TestCase
TestPrefixCache = PrefixCacheAgainstHistories.TestCase
TestPromptCache.settings = TestPrefixCache.settings = settings(max_examples=50, stateful_step_count=20)


def common(one, other):
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


@contextmanager
def failing(model, op, n_calls):
    """A context in which the n-th call of an operation of a model fails."""
    calls = []

    def failing_one(real):
        def fails(*args):
            calls.append(op)
            if len(calls) == n_calls:
                raise ZeroDivisionError
            return real(*args)

        return fails

    with pytest.MonkeyPatch.context() as patch:
        replace_operation(patch, model, op, failing_one)
        yield


def cache_of(policy, name="T1", kv="fp32", **settings):
    """A cache under watch, and what puts a prompt into it (a start in use, or nothing)."""
    cache = watched({"prompt": PromptCache, "prefix": PrefixCache}[policy](model(name, kv), **settings))
    return cache, cache.prefill if policy == "prompt" else cache.add


def reused(cache, prompt):
    """How much of a prompt is reused; its logits are checked, its use ended."""
    with cache.prefill(prompt) as start:
        assert_cold(start.logits, "T1", "fp32", prompt)
        return start.report.n_reused


BOTH = pytest.mark.parametrize("policy, settings", [("prefix", {}), ("prompt", {"block_size": 2})])
A8, A5 = list(range(8)), list(range(5))


# ---- the whole prompt is held


def test_c16_a_whole_prompt_hit_computes_what_its_rule_leaves():
    cache = PromptCache(model(), block_size=4)
    assert [reused(cache, prompt) for prompt in (A8, A8, range(12), range(12))] == [0, 4, 8, 8]
    prefixes = PrefixCache(model())
    prefixes.add(A8)
    assert [reused(prefixes, prompt) for prompt in (A8, range(12), A8)] == [7, 8, 7]


@BOTH
def test_c17_a_longer_entry_is_cut_and_stays_whole(policy, settings):
    cache, put = cache_of(policy, **settings)
    put(A8)
    start = cache.prefill(A5)
    assert (start.report.n_reused, start.report.n_computed, start.cache.length) == (4, 1, 5)
    assert_cold(start.logits, "T1", "fp32", A5)
    assert cache.nbytes == 8 * 128
    assert reused(cache, range(10)) == 8


@BOTH
def test_c19_there_is_always_a_token_to_compute(policy, settings):
    cache, put = cache_of(policy, **settings)
    for prompt in ([7], [7, 8, 9]):
        put(prompt)
        for _ in range(2):
            with cache.prefill(prompt) as start:
                assert start.report.n_computed >= 1
                assert len(prompt) > 1 or start.report.n_reused == 0
                first = int(start.logits.argmax())
                rest = generate(model(), [first], 3, start.cache).tokens[0].tolist()
                assert [first, *rest] == generate(model(), prompt, 4).tokens[0].tolist()


# ---- one user does not see another


@BOTH
def test_c24_what_a_user_appends_is_not_in_the_cache(policy, settings):
    cache, put = cache_of(policy, **settings)
    put(range(6))
    held = [(block, block.payload.copy()) for block in cache.store]
    starts = [cache.prefill([0, 1, 2, 3, 4, 5, 6]) for _ in range(2)]
    nbytes = cache.nbytes
    for start, token in zip(starts, (10, 20)):
        assert (start.cache.length, start.report.n_reused) == (7, 6)
        for length in range(8, 13):  # both write the same positions, in turn
            model().decode([token], start.cache)
        prompt = [*range(7), *[token] * 5]
        assert_cold(model().decode([token], start.cache), "T1", "fp32", [*prompt, token])
    assert cache.nbytes == nbytes
    assert all([np.array_equal(block.payload, copy) for block, copy in held])
    for block, _ in held:
        with pytest.raises(ValueError, match="read-only"):
            block.payload[...] = 0


def test_c25_a_partly_filled_block_is_not_shared():
    cache = PromptCache(model(), block_size=4)
    one, other = cache.prefill([0, 1, 2, 3, 4, 5, 7, 8]), cache.prefill([0, 1, 2, 3, 4, 5, 9, 10])
    assert [start.report.n_reused for start in (one, other)] == [0, 4]
    rows = [start.cache.rows(0, 8) for start in (one, other)]
    np.testing.assert_allclose(rows[0][..., :6, :], rows[1][..., :6, :], atol=1e-5)
    assert np.abs(rows[0][..., 6:, :] - rows[1][..., 6:, :]).max(axis=(0, 1, 2, 4)).min() > 0.1
    assert_cold(one.logits, "T1", "fp32", [0, 1, 2, 3, 4, 5, 7, 8])
    assert_cold(other.logits, "T1", "fp32", [0, 1, 2, 3, 4, 5, 9, 10])
    assert cache.nbytes == 12 * 128


def test_a_callers_array_may_change_afterwards():
    cache, prompt = PromptCache(model(), block_size=2), np.arange(6)
    start = cache.prefill(prompt)
    prompt[:] = 9
    assert [reused(cache, A8), reused(cache, [9] * 6), start.deviation() < 1e-5] == [6, 0, True]


# ---- memory


def test_c54_a_prefix_larger_than_the_budget_evicts_nothing():
    cache, _ = cache_of("prefix", capacity_bytes=1024)
    assert [cache.add([1, 2, 3, 4]), cache.add([5, 6, 7, 8])] == [512, 512]
    with pytest.raises(CacheError, match="needs 1152 bytes.* budget of 1024"):
        cache.add(range(10, 19))
    assert (cache.nbytes, cache.stats.refused, cache.stats.evicted) == (1024, 1, 0)
    assert cache.add([10, 11, 12, 13, 14]) == cache.nbytes == 640
    assert (cache.stats.free, cache.stats.evicted) == (384, 2)


def test_c54_a_prompt_larger_than_the_budget_evicts_nothing():
    """Blocks of one token: the least recently used go one by one, from their tails, so that 8 are always held."""
    cache, _ = cache_of("prompt", block_size=1, capacity_bytes=1024)
    for prompt in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cache.prefill(prompt).release()
    with cache.prefill(range(10, 19)) as start:
        assert_cold(start.logits, "T1", "fp32", range(10, 19))
        assert (start.report.n_evicted, start.report.nbytes, cache.stats.refused) == (0, 1024, 1)
    start = cache.prefill([20, 21, 22, 23, 24])
    assert (start.report.n_evicted, start.report.nbytes, cache.stats.evicted) == (5, 1024, 5)
    start.release()
    assert [reused(cache, [1, 2, 3, 4, 5]), cache.stats.refused] == [0, 1]


def test_an_entry_does_not_stand_in_the_way_of_its_own_continuation():
    """[1, 2, 3] is in nobody's use, so that there is room for [1, 2, 3, 4] once it has gone."""
    cache, _ = cache_of("prefix", capacity_bytes=4 * 128)
    cache.add([1, 2, 3])
    assert cache.add([1, 2, 3, 4]) == 4 * 128
    assert (cache.nbytes, cache.stats.evicted) == (4 * 128, 1)


def test_which_of_two_equal_matches_is_used_does_not_hang_on_the_weights():
    """[1, 2] is the beginning of both entries; what is evicted afterwards is the same in every model."""
    left = []
    for seed in range(8):
        cache = PrefixCache(Transformer.random(CONFIGS["T1"], seed, FP32), capacity_bytes=8 * 128)
        cache.add([1, 2, 3, 4])
        cache.add([1, 2, 5, 6])
        cache.prefill([1, 2, 9]).release()
        cache.add([7, 7, 7, 7])
        left.append(sorted([np.frombuffer(block.ids, "<i8").tolist() for block in cache.store]))
    assert all([entries == left[0] for entries in left])


def test_rows_in_use_are_not_evicted_and_the_request_is_served_uncached():
    cache, _ = cache_of("prompt", block_size=2, capacity_bytes="0.512 kB")  # 4 rows
    start = cache.prefill([1, 2, 3, 4])
    assert reused(cache, [5, 6]) == 0
    assert (cache.stats.refused, cache.stats.protected, reused(cache, [1, 2, 3, 4, 5])) == (1, 512, 4)
    start.release()
    assert [reused(cache, [5, 6]), reused(cache, [5, 6, 7]), reused(cache, [1, 2, 3, 4, 5])] == [0, 2, 2]


# ---- time


def test_c53_entries_live_from_the_end_of_their_last_use():
    clock = Clock()
    cache, _ = cache_of("prompt", block_size=2, ttl_s=10, clock=clock)

    def at(now, prompt=A5):
        clock.now = now
        return reused(cache, prompt)

    assert [at(0), at(9.99), at(19.5), at(29.5)] == [0, 4, 4, 0]  # each hit prolongs; at exactly 10 it is dead
    assert cache.stats.expired == 2
    start = cache.prefill(A5)
    assert at(100) == 4  # in use: not freed under its user
    clock.now = 105
    start.release()
    clock.now = 114.99
    start.release()  # the use ended at 105
    assert at(114.99) == 4
    clock.now = 124.99
    assert (cache.nbytes, len(cache.store)) == (0, 0)
    assert_cold(model().decode([9], start.cache), "T1", "fp32", [*A5, 9])


def test_a_use_that_ended_unnoticed_ended_when_it_did():
    clock = Clock()
    cache, _ = cache_of("prompt", block_size=2, ttl_s=10, clock=clock)
    start = cache.prefill(A5)
    clock.now = 1
    del start  # nothing asks the cache until 11
    clock.now = 11
    assert reused(cache, A5) == 0


# ---- starts


@BOTH
def test_a_start_ends_its_use_by_leaving_by_release_and_by_being_forgotten(policy, settings):
    cache, put = cache_of(policy, **settings)
    put(A8)
    for how in ("leave", "raise", "release", "forget"):
        start = cache.prefill(A8)
        fork = start.cache.fork()
        assert cache.stats.protected > 0
        if how == "leave":
            with start as same:
                assert same is start
        elif how == "raise":
            with pytest.raises(KeyError), start:
                raise KeyError
        elif how == "release":
            start.release()
            start.release()
        private = start.cache
        del start
        if how == "leave":
            del same
        assert (cache.stats.protected, cache.stats.evictable) == (0, cache.nbytes)
        for mine in (private, fork):
            assert_cold(model().decode([3], mine), "T1", "fp32", [*A8, 3])


def test_a_start_in_a_cycle_ends_its_use_when_it_is_collected():
    cache = PromptCache(model(), block_size=2)
    start = cache.prefill(A8)
    start.itself = start
    del start
    gc.collect()
    assert (cache.stats.protected, cache.stats.evictable) == (0, 8 * 128)


def test_a_private_cache_lets_go_of_what_its_window_hides():
    cache = PromptCache(model("window"), block_size=2)
    cache.prefill(A8).release()
    private, plain = cache.prefill(A8).cache, model("window").new_cache()
    for number in range(60):
        for mine in (private, plain):
            model("window").decode([number % 32], mine)
    sizes = [sum([layer.buffer.nbytes for layer in mine._layers]) for mine in (private, plain)]
    assert sizes[0] <= 2 * sizes[1]


def test_a_deviation_is_measured_unseen():
    start = PromptCache(model()).prefill(A8)
    with Ledger() as ledger:
        assert start.deviation() < 1e-5
    assert ledger.total() == ledger.total() * 0


# ---- errors


@BOTH
@pytest.mark.parametrize("op", ["embed", "rope", "kv_append", "attention", "linear", "cache_load"])
def test_an_error_in_a_forward_leaves_the_cache_as_it_was(policy, settings, op):
    cache, put = cache_of(policy, **settings, capacity_bytes=12 * 128)
    put(A8)
    before, held = cache.stats, set(check_store(cache.store))
    for call in {cache.prefill} if op == "cache_load" else {cache.prefill, put}:
        with failing(cache.model, op, 1), pytest.raises(ZeroDivisionError):
            call([0, 1, 2, 3, 4, 5, 9, 9])
        assert (cache.stats, set(check_store(cache.store))) == (before, held)
    with Ledger() as ledger:
        assert reused(cache, [0, 1, 2, 3, 4, 5, 9, 9]) == 6
    assert {entry.phase for entry in ledger.entries()} == {"prefill"}


@pytest.mark.parametrize("policy, settings, match", [
    ("prompt", {"block_size": 16, "capacity_bytes": 16 * 128 - 1}, "one block at least: 16 tokens of 128 B are 2048"),
    ("prefix", {"capacity_bytes": 127}, "one block at least"),
    ("prompt", {"ttl_s": 0}, "ttl_s is 0"), ("prompt", {"ttl_s": -1}, "ttl_s is -1"),
    ("prompt", {"tier": "disk"}, "no tier 'disk'; known: device, host"), ("prefix", {"tier": None}, "no tier None"),
    ("prompt", {"block_size": 0}, "block_size is 0"), ("prompt", {"block_size": 1.5}, "block_size is 1.5"),
    ("prompt", {"recompute_tokens": -1, "segments": True}, "recompute_tokens is -1"),
    ("prompt", {"capacity_bytes": "8 furlongs"}, "capacity_bytes is '8 furlongs'"),
    ("prompt", {"salt": "text"}, "salt"), ("prompt", {"ttl_s": "10"}, "ttl_s"),
])
def test_settings_that_cannot_be_meant_are_refused(policy, settings, match):
    with pytest.raises(InputError, match=match):
        cache_of(policy, **settings)
    assert issubclass(UnknownName, InputError)


@BOTH
@pytest.mark.parametrize("tokens, match", [
    ([], "at least one"), ([[1, 2], [3, 4]], "one sequence"), ([32], "token 32 is not in the vocabulary, expected 0 to 31"),
    ([0, -1], "token -1 is not in the vocabulary"), ([1.5], "integers"), ([[1], [2, 3]], "one sequence"),
])
def test_tokens_that_are_no_prompt_are_refused(policy, settings, tokens, match):
    cache, put = cache_of(policy, **settings)
    put(A8)
    before, held = cache.stats, set(check_store(cache.store))
    for call in (cache.prefill, put):
        with pytest.raises(InputError, match=match):
            call(tokens)
    assert (cache.stats, set(check_store(cache.store))) == (before, held)


def test_a_prefix_beyond_the_models_context_is_refused():
    from dataclasses import replace

    cache = PrefixCache(Transformer.random(replace(CONFIGS["T1"], max_context=6), 0, FP32))
    with pytest.raises(CacheError, match="7 tokens, expected at most the model's context of 6"):
        cache.add(range(7))
    assert (cache.nbytes, cache.stats.refused, cache.add(range(6))) == (0, 0, 6 * 128)


# ---- segments

PIECES = [(1, 2, 3, 4), (4, 3, 2, 1, 2), (5,), (9, 9, 9, 9, 9, 9), (1, 2), (3, 4, 5, 6, 7, 8, 9)]
one_layer = st.sampled_from(["one layer", "one layer, window"])
joined_pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(lambda pieces: sum(pieces, ()))
made_of_pieces = st.lists(joined_pieces, min_size=1, max_size=7)


def segmented(name, kv="fp32", size=2, numeric=True, **settings):
    return watched(PromptCache(model(name, kv, numeric), size, segments=True, **settings))


def segments_report_is_true(start, ledger, name, kv, ids, n_chain, parts):
    """Counts of a start that reused `n_chain` rows at the beginning and `parts` rows elsewhere."""
    report, n_reused = start.report, n_chain + sum(parts)
    assert (report.n_asked, report.n_reused, report.n_computed) == (len(ids), n_reused, len(ids) - n_reused)
    assert report.saved == cold(name, kv, tuple(ids))[1] - ledger.total()
    loaded = sum([loaded_bytes(name, kv, n) for n in [n_chain, *parts]])
    assert report.bytes_loaded == loaded == ledger.total(op="cache_load").kv_bytes_read
    n_loads = sum([entry.op == "cache_load" for entry in ledger.entries()])
    assert n_loads == (n_chain > 0) + len(parts)


def greedy(ids, size, n_chain, stored):
    """Tokens reused behind the chain: from left to right, every block that is stored somewhere."""
    at, n = n_chain, 0
    while at + size < len(ids):
        step = size if ids[at : at + size] in stored else 0
        n, at = n + step, at + (step or 1)
    return n


@settings(max_examples=60)
@given(name=one_layer, prompts=made_of_pieces, size=st.integers(1, 3))
def test_segments_are_exact_in_one_layer(name, prompts, size):
    cache, shapes, seen = segmented(name, size=size), segmented(name, size=size, numeric=False), {}
    for ids in prompts:
        stored = {history[-1] for history in check_store(cache.store)}
        chain = split(None, ids[: (len(ids) - 1) // size * size], size)
        held = check_store(cache.store)
        n_chain = size * sum([history in held for history in parents_of(chain)])
        with Ledger() as ledger:
            start = cache.prefill(ids)
        assert_cold(start.logits, name, "fp32", ids)
        assert not start.report.approximate
        assert start.report.n_reused == n_chain + greedy(ids, size, n_chain, stored)
        assert start.report.saved == cold(name, "fp32", ids)[1] - ledger.total()
        assert start.report.bytes_loaded == ledger.total(op="cache_load").kv_bytes_written
        assert shapes.prefill(ids).report == start.report
        assert start.deviation() < 1e-5
        check_payloads(cache, name, "fp32", seen)


@settings(max_examples=60)
@given(
    name=st.sampled_from(["T1", "window", "grouped", "one layer"]), kv=formats, prompts=made_of_pieces, size=st.integers(1, 3),
    n_tokens=st.none() | st.integers(4, 20), n_recomputed=st.integers(0, 3), data=st.data(),
)
def test_what_is_held_is_exact_whatever_was_reused(name, kv, prompts, size, n_tokens, n_recomputed, data):
    """Rows that were computed behind an approximate reuse are not found in the exact chain."""
    capacity = None if n_tokens is None else n_tokens * row_bytes(name, kv) * CONFIGS[name].n_layers
    settings = {"capacity_bytes": capacity, "recompute_tokens": n_recomputed}
    caches = [segmented(name, kv, size, numeric, **settings) for numeric in (True, False)]
    seen, starts = {}, []
    for ids in prompts:
        with Ledger():
            start, other = [cache.prefill(ids) for cache in caches][:2]
        report = start.report
        assert other.report == report
        assert report.n_asked == report.n_reused + report.n_computed == len(ids) > report.n_reused
        if not report.approximate:
            assert_cold(start.logits, name, kv, ids)
        check_payloads(caches[0], name, kv, seen)
        starts.append((start, other))
        if data.draw(st.booleans(), label="release"):
            starts.clear()
    del start, other
    starts.clear()
    for cache in caches:
        assert cache.stats.protected == 0
        check_store(cache.store)


def test_reuse_above_the_first_layer_is_an_approximation_and_says_so():
    cache = segmented("T1", size=4)
    reused(cache, A8)
    prompt = [20, 21, *A8, 9]
    with Ledger() as ledger:
        start = cache.prefill(prompt)
    segments_report_is_true(start, ledger, "T1", "fp32", prompt, 0, [8])
    assert start.report.approximate and start.deviation() > 1e-3
    assert cache.nbytes == 8 * 128  # rows of [20, 21, 0, 1] are behind no approximate reuse, but no full block
    start.release()
    mixed = [*A8, 30, *A8[:4], 31]
    with Ledger() as ledger:
        start = cache.prefill(mixed)
    segments_report_is_true(start, ledger, "T1", "fp32", mixed, 8, [4])
    assert reused(cache, [*A8, 30, 31]) == 8
    with pytest.raises(AssertionError):
        assert_cold(start.logits, "T1", "fp32", mixed)


def test_rows_before_an_approximate_reuse_are_kept():
    cache = segmented("T1", size=2)
    reused(cache, A5)
    assert cache.prefill([20, 21, 22, 0, 1, 2, 3, 9]).report.n_reused == 4
    assert check_store(cache.store).keys() == {(None, (0, 1)), (None, (0, 1), (2, 3)), (None, (20, 21))}


@pytest.mark.parametrize("n_recomputed, n_reused", [(0, 8), (1, 7), (5, 3), (7, 1), (8, 0), (99, 0)])
def test_tokens_recomputed_are_not_reused(n_recomputed, n_reused):
    cache = segmented("T1", size=4, recompute_tokens=n_recomputed)
    reused(cache, A8)
    prompt = [20, 21, *A8, 9]
    with Ledger() as ledger:
        start = cache.prefill(prompt)
    segments_report_is_true(start, ledger, "T1", "fp32", prompt, 0, [n_reused] if n_reused else [])
    assert start.report.approximate == (n_reused > 0)
    if n_reused == 0:
        assert_cold(start.logits, "T1", "fp32", prompt)
        assert cache.nbytes == 16 * 128  # all of it exact, so all full blocks are kept


@pytest.mark.parametrize("kv, before, approximate", [
    ("fp32", [9, 9, 9, 9], False), ("fp32", [9], False), ("fp16", [9, 9, 9, 9], False), ("fp16", [9], True),
])
def test_keys_rotated_after_they_were_rounded_are_an_approximation(kv, before, approximate):
    cache = segmented("one layer", kv, size=4)
    cache.prefill(A8).release()
    prompt = [*before, *A8[4:], 3]
    start = cache.prefill(prompt)
    assert (start.report.n_reused, start.report.approximate) == (4, approximate)
    assert_cold(start.logits, "one layer", kv, prompt)


def test_a_window_loads_what_it_can_see_of_each_segment():
    cache, prompt = segmented("one layer, window", size=2), [*range(6), 20, *range(10, 16), 21]
    for part in (range(7), range(10, 17)):
        cache.prefill(part).release()
    with Ledger() as ledger:
        start = cache.prefill(prompt)
    segments_report_is_true(start, ledger, "one layer, window", "fp32", prompt, 6, [6])
    assert start.report.bytes_loaded == 2 * 4 * 64  # window of 5: 4 rows each


def test_a_block_that_is_still_held_is_found_after_its_double_has_gone():
    cache = segmented("one layer", size=2, capacity_bytes=8 * 64)
    kept = cache.prefill([1, 2, 7, 8, 0])
    cache.prefill([3, 4, 7, 8, 0]).release()  # holds [7, 8] once more, and is dropped for what comes now
    cache.prefill([10, 11, 12, 13, 0]).release()
    assert check_store(cache.store).keys() >= {(None, (1, 2), (7, 8))}
    assert (None, (3, 4), (7, 8)) not in check_store(cache.store)
    assert cache.prefill([5, 7, 8, 6]).report.n_reused == 2
    kept.release()


def test_another_salt_is_another_history():
    keys = []
    for salt in (b"", b"", b"one", b"two"):
        cache = PromptCache(model(), block_size=2, salt=salt)
        cache.prefill(A8)
        keys.append({block.key for block in cache.store})
    assert keys[0] == keys[1] and len(set.union(*keys)) == 3 * 4


@pytest.mark.parametrize("config", ["T1", "grouped"])
def test_c35_a_key_shifted_twice_is_where_both_shifts_take_it(config):
    rope = model(config).rope
    keys = np.random.default_rng(0).standard_normal((1, 2 * CONFIGS[config].head_dim)).astype(np.float32)

    def turn(rows, rotation):
        heads = ops.rope.__wrapped__(rows, rotation, head_dim=CONFIGS[config].head_dim, turned=(2,))
        return heads.reshape(rows.shape)  # one position: its heads are next to each other

    shifted = turn(keys, rope.rotation(7, 1).data)
    for distance in (3, -5):
        shifted = turn(shifted, rope.rotation_by(distance))
    np.testing.assert_allclose(shifted, turn(keys, rope.rotation(5, 1).data), rtol=0, atol=1e-6)
    assert rope.rotation_by(0) is None


# ---- threads


class SlowStore(WatchedStore):
    """Lets other threads run in the middle of what the lock has to hold together."""

    def child(self, parent, ids):
        time.sleep(0)
        return super().child(parent, ids)

    def acquire(self, chain):
        time.sleep(0)
        super().acquire(chain)

    def release(self, chain, now_s):
        time.sleep(0)
        super().release(chain, now_s)


@pytest.mark.parametrize("policy, segments", [("prompt", False), ("prefix", False), ("prompt", True)])
def test_threads_share_a_cache(policy, segments):
    """Four threads, fifty prompts each, a budget of a few blocks: what each gets is right, and nothing is left in use."""
    settings = {"block_size": 2, "segments": segments} if policy == "prompt" else {}
    cache, put = cache_of(policy, "one layer", capacity_bytes=20 * 64, **settings)
    cache.store.__class__ = SlowStore
    choose = np.random.default_rng(1)
    work = [[tuple(choose.integers(3, size=choose.integers(1, 12)).tolist()) for _ in range(50)] for _ in range(4)]
    for ids in sum(work, []):
        cold("one layer", "fp32", ids)

    def serve(prompts):
        starts = []
        for number, ids in enumerate(prompts):
            if policy == "prefix" and number % 3 == 0:
                try:
                    put(ids)
                except CacheError:
                    pass  # no room beside what the others use
            starts = [*starts[-1:], cache.prefill(ids)]
            assert_cold(starts[-1].logits, "one layer", "fp32", ids)
            assert cache.nbytes <= 20 * 64
            if number % 2:
                starts[-1].release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(serve, prompts) for prompts in work]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    stats = cache.stats
    assert (stats.protected, stats.free + stats.evictable) == (0, 20 * 64)
    assert stats.hit_tokens + stats.miss_tokens == sum(map(len, sum(work, [])))
    assert stats.hit_tokens > 0 and stats.evicted > 0
    check_payloads(cache, "one layer", "fp32", {})


def test_an_entry_that_continues_another_replaces_its_last_block():
    cache, _ = cache_of("prefix")
    cache.add([1, 2, 3, 4, 5, 6])
    assert cache.add([1, 2, 3, 4, 5, 6, 7, 8]) == 8 * 128
    assert cache.nbytes == 8 * 128  # eight distinct tokens
    assert cache.prefill([1, 2, 3, 4, 5, 6, 9]).report.n_reused == 6


def test_a_prefix_beyond_the_budget_is_refused_before_it_is_computed(monkeypatch):
    cache, _ = cache_of("prefix", capacity_bytes=4 * 128)
    monkeypatch.setattr(cache.model, "prefill", None)
    with pytest.raises(CacheError, match="needs 640 bytes, more than the budget of 512"):
        cache.add([1, 2, 3, 4, 5])
    assert cache.stats.refused == 1


def test_a_shape_only_start_has_no_deviation():
    start = PromptCache(Transformer.shape_only(CONFIGS["T1"], FP32)).prefill([1, 2])
    with pytest.raises(InputError, match="shape-only run has none"):
        start.deviation()


def test_what_is_given_back_during_a_forward_is_room(monkeypatch):
    """Another thread's start may end while this one computes; its rows are no reason to refuse."""
    cache, _ = cache_of("prompt", block_size=2, capacity_bytes=4 * 128)
    held = cache.prefill([1, 2, 3, 4])

    def releasing(attention):
        def released_meanwhile(*operands):
            held.release()
            return attention(*operands)

        return released_meanwhile

    replace_operation(monkeypatch, cache.model, "attention", releasing)
    cache.prefill([5, 6]).release()
    assert cache.stats.refused == 0 and cache.stats.evicted == 1
