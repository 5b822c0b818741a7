"""Sessions on disk: what comes back, and that a damaged, foreign or lying file is refused with nothing changed."""

import ast
import builtins
import json
import os
import threading
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npinfer
from npinfer import CacheError, CheckpointError, ModelConfig, Precision, SessionCache, Transformer, blocks, layers, sessionfile
from strategies import FP32, T1

TINY = ModelConfig(n_layers=1, d_model=4, n_heads=1, head_dim=2, d_ff=3, vocab_size=7)
TINY_ROW_BYTES = 2 * 2 * 4  # K and V of two numbers
MODEL = Transformer.random(TINY, seed=1, precision=FP32)
SHAPE = Transformer.shape_only(TINY, FP32)
PREFIX_BYTES, CHECKSUM_BYTES = 16 + 8, 32  # what stands before the header, and behind everything


class Clock:
    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def new_cache(model=MODEL, capacity=None, ttl_s=None, now_s=0.0, wall_s=1e9):
    return SessionCache(model, capacity, ttl_s, Clock(now_s), Clock(wall_s))


def some_sessions(model=MODEL, **settings):
    """Two sessions: "a" of 4 rows and 5 ids, two of them generated, then 7 of 2 rows and ids, a second later."""
    sessions = new_cache(model, **settings)
    sessions.session("a").generate([1, 2, 3], 2)
    sessions.store.clock.now_s += 1
    sessions.session(7).prefill([5, 6]).release()
    return sessions


def written(sessions, folder):
    """The bytes of a file of `sessions`; equal bytes mean that equal sessions are held."""
    path = folder / "snapshot"
    sessions.save(path)
    return path.read_bytes()


def parts(data):
    """Header and rest of a file."""
    n_header = int.from_bytes(data[16:24], "little")
    return json.loads(data[PREFIX_BYTES : PREFIX_BYTES + n_header]), data[PREFIX_BYTES + n_header : -CHECKSUM_BYTES]


def crafted(header, rest=b"", n_header=None):
    """A file with the right checksum, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = b"npinfer-sessions" + (len(text) if n_header is None else n_header).to_bytes(8, "little") + text + rest
    return body + blake2b(body, digest_size=CHECKSUM_BYTES).digest()


@contextmanager
def allocations():
    """Gives a function that returns the bytes allocated inside: (kept, at most)."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


@pytest.fixture
def victim(tmp_path):
    """A cache that must not change, and how to have it refuse a file."""
    sessions = some_sessions()
    sessions.session("mine").generate([4, 4], 2)
    before, stats = written(sessions, tmp_path), sessions.stats

    class Victim:
        path = tmp_path / "bad"

        def refuses(self, data, match=None):
            self.path.write_bytes(data)
            with pytest.raises(CheckpointError, match=match):  # a ValueError
                sessions.load(self.path)
            assert sessions.stats == stats

        def is_as_before(self):
            assert written(sessions, tmp_path) == before
            with sessions.session("a").prefill([1, 2, 3, 0, 0, 0]) as start:
                assert start.report.n_reused >= 3
                cold = MODEL.prefill([1, 2, 3, 0, 0, 0], MODEL.new_cache())
                np.testing.assert_allclose(start.logits, cold, rtol=1e-5, atol=1e-5)

    victim = Victim()
    yield victim
    victim.is_as_before()


@pytest.fixture
def good(tmp_path):
    return written(some_sessions(), tmp_path)


@pytest.mark.parametrize("precision", [FP32, Precision(weights="fp16", kv="fp16"), Precision(weights="int4", kv="int8")])
@pytest.mark.parametrize("window", [None, 3])
def test_a_dialogue_goes_on_after_save_and_load_as_if_never_interrupted(tmp_path, precision, window):
    """Case 4: prompt 5, generate 3: 7 rows and 8 ids; the next forward takes id 7 at position 7."""
    config = replace(T1, sliding_window=window)
    model, again = [Transformer.random(config, seed=1, precision=precision) for _ in range(2)]
    prompt = [3, 1, 4, 1, 5]
    sessions = SessionCache(model)
    ids = prompt + sessions.session("a").generate(prompt, 3).tokens[0].tolist()
    sessions.save(tmp_path / "file")
    uninterrupted = sessions.session("a").generate(ids, 5)

    header, _ = parts((tmp_path / "file").read_bytes())
    assert [(entry["n_ids"], entry["n_rows"]) for entry in header["sessions"]] == [(8, 7)]
    resumed = SessionCache(again)
    resumed.load(tmp_path / "file")
    assert resumed.nbytes == 7 * again.kv_bytes_per_token
    turn = resumed.session("a").generate(ids, 5)
    assert (turn.report.n_reused, turn.report.n_computed) == (7, 1)
    assert turn.tokens.tolist() == uninterrupted.tokens.tolist()
    assert turn.report == uninterrupted.report
    if precision is FP32:
        assert ids + turn.tokens[0].tolist() == prompt + npinfer.generate(model, prompt, 8).tokens[0].tolist()


ids = st.lists(st.integers(0, 6), min_size=1, max_size=40)
names = st.text(max_size=5) | st.integers()


@settings(max_examples=40)
@given(dialogues=st.dictionaries(names, st.tuples(ids, st.integers(1, 3)), max_size=4), numeric=st.booleans())
def test_what_is_saved_comes_back(tmp_path_factory, dialogues, numeric):
    """Any names and lengths, the last block full or not; a second save gives the same bytes."""
    folder = tmp_path_factory.mktemp("sessions")
    model = MODEL if numeric else SHAPE
    sessions, loaded = new_cache(model), new_cache(model, now_s=50.0)
    seen = {}
    for id, (prompt, n_output) in dialogues.items():
        sessions.store.clock.now_s += 1
        made = sessions.session(id).generate(prompt, n_output).tokens
        seen[id] = prompt + (made[0].tolist() if numeric else [0] * n_output)
    first = written(sessions, folder)
    loaded.load(folder / "snapshot")
    assert loaded.nbytes == sessions.nbytes == sum([len(ids) - 1 for ids in seen.values()]) * TINY_ROW_BYTES
    assert loaded.stats.protected == 0
    header, rest = parts(first)
    header_again, rest_again = parts(written(loaded, folder))
    by_id = [sorted(h["sessions"], key=lambda entry: repr(entry["id"])) for h in (header, header_again)]
    assert by_id[0] == by_id[1]
    assert len(rest) == len(rest_again)
    for id, ids in seen.items():
        start = loaded.session(id).prefill([*ids, 1, 2])
        assert start.report.n_reused == len(ids) - 1
        if numeric:
            cold = model.prefill([*ids, 1, 2], model.new_cache())
            np.testing.assert_allclose(start.logits, cold, rtol=1e-5, atol=1e-5)


def test_loading_replaces_what_is_held(tmp_path):
    some_sessions().save(tmp_path / "file")
    sessions = new_cache()
    sessions.session("a").prefill([6, 6, 6]).release()
    sessions.session("gone").prefill([1]).release()
    sessions.load(str(tmp_path / "file"))  # a path of any kind
    assert ("a" in sessions, 7 in sessions, "7" in sessions, "gone" in sessions) == (True, True, False, False)
    assert sessions.nbytes == 6 * TINY_ROW_BYTES
    assert sessions.session("a").prefill([6, 6, 6, 6]).report.n_reused == 0
    sessions.load(tmp_path / "file")  # again: nothing is held twice
    assert sessions.nbytes == 6 * TINY_ROW_BYTES


def test_nothing_can_be_saved_and_loaded(tmp_path):
    new_cache().save(tmp_path / "file")
    sessions = some_sessions()
    sessions.load(tmp_path / "file")
    assert (sessions.nbytes, "a" in sessions) == (0, False)


def test_a_file_cut_short_anywhere_is_refused(victim, good):
    for length in range(len(good)):
        victim.refuses(good[:length])
    for more in (b"\0", good[-1:], good):
        victim.refuses(good + more)


def test_a_file_with_any_byte_changed_is_refused(victim, good):
    for at in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            victim.refuses(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])


def test_bytes_that_changed_places_are_refused(victim, good):
    _, rest = parts(good)
    middle = len(good) - CHECKSUM_BYTES - len(rest)
    victim.refuses(good[:middle] + rest[8:16] + rest[:8] + rest[16:] + good[-CHECKSUM_BYTES:], "damaged or cut short")


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"npinfer-sessions", b"PK\x03\x04" + b"\0" * 80, b"\x80\x04K\x01." * 20])
def test_a_file_of_another_kind_is_refused(victim, data):
    victim.refuses(data, "not a file of sessions")


def test_a_file_that_is_not_there_is_refused(victim, tmp_path):
    sessions = some_sessions()
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "no" / "where"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            sessions.load(path)
    assert sessions.nbytes == 6 * TINY_ROW_BYTES


@pytest.mark.parametrize("model", [
    Transformer.random(TINY, seed=2, precision=FP32),  # other weights
    Transformer.random(TINY, seed=1, precision=replace(FP32, kv="fp16")),
    Transformer.random(TINY, seed=1, precision=replace(FP32, activations="fp16")),
    Transformer.random(replace(TINY, rope_theta=10_001.0), seed=1, precision=FP32),
    Transformer.random(replace(TINY, sliding_window=2), seed=1, precision=FP32),
    Transformer.random(replace(TINY, n_layers=2), seed=1, precision=FP32),
    Transformer.random(replace(TINY, norm_eps=2e-5), seed=1, precision=FP32),
    SHAPE,
])  # fmt: skip
def test_sessions_of_another_model_are_refused(victim, tmp_path, model):
    victim.refuses(written(some_sessions(model), tmp_path), "another model")


def test_the_name_of_a_model_is_no_part_of_it(tmp_path):
    some_sessions().save(tmp_path / "file")
    sessions = new_cache(Transformer.random(replace(TINY, name="by another name"), seed=1, precision=FP32))
    sessions.load(tmp_path / "file")
    assert sessions.nbytes == 6 * TINY_ROW_BYTES


def test_a_crafted_file_can_be_right(victim, good, tmp_path):
    """Or the refusals below would mean nothing."""
    header, rest = parts(good)
    assert crafted(header, rest) == good
    del header["sessions"][1]
    (tmp_path / "right").write_bytes(crafted(header, rest[: 5 * 8 + 4 * TINY_ROW_BYTES]))
    sessions = new_cache()
    sessions.load(tmp_path / "right")
    assert sessions.nbytes == 4 * TINY_ROW_BYTES


HUGE = 10**400  # no float
LIES = {
    "n_ids": [4, 6, 0, -1, -5, 2**31, 2**60, 2**63, 2**64, HUGE, 5.5, "5", True, None, [5], float("inf"), float("nan")],
    "n_rows": [3, 5, 6, 0, -1, -4, 2**31, 2**60, 2**63, 2**64, HUGE, 4.5, "4", True, None, [4], float("inf"), float("nan")],
    "idle_s": [-1, -1e-9, float("inf"), float("-inf"), float("nan"), HUGE, "0", True, None, [0]],
    "id": [None, True, 1.5, ["a"], {"a": 1}, 7],  # 7 is the other session's
}


@pytest.mark.parametrize("field, value", [
    (field, value) for field, values in LIES.items() for value in values
], ids=lambda value: repr(value)[:12] if value != HUGE else "HUGE")  # fmt: skip
def test_a_session_that_lies_is_refused(victim, good, field, value):
    header, rest = parts(good)
    header["sessions"][0][field] = value
    with allocations() as allocated:
        victim.refuses(crafted(header, rest))
        assert allocated()[1] < 1e6  # however much the file says there is
    with_ttl = some_sessions(ttl_s=100)
    with pytest.raises(CheckpointError):
        with_ttl.load(victim.path)
    assert with_ttl.nbytes == 6 * TINY_ROW_BYTES


@pytest.mark.parametrize("field", ["id", "idle_s", "n_ids", "n_rows"])
def test_a_session_that_lacks_something_is_refused(victim, good, field):
    header, rest = parts(good)
    del header["sessions"][1][field]
    victim.refuses(crafted(header, rest))


@pytest.mark.parametrize("field, value", [
    ("version", 0), ("version", 2), ("version", "1"), ("version", None), ("version", [1]), ("version", HUGE),
    ("fingerprint", ""), ("fingerprint", None), ("fingerprint", "00" * 32), ("fingerprint", 5),
    ("wall_s", None), ("wall_s", "now"), ("wall_s", HUGE), ("wall_s", float("nan")), ("wall_s", float("inf")),
    ("wall_s", float("-inf")), ("wall_s", []),
    ("sessions", None), ("sessions", 5), ("sessions", "ab"), ("sessions", [5]), ("sessions", [None]), ("sessions", [[]]),
    ("sessions", {"a": {}}), ("sessions", []), ("sessions", [{}]),
], ids=lambda value: repr(value)[:12] if value != HUGE else "HUGE")  # fmt: skip
def test_a_header_that_lies_is_refused(victim, good, field, value):
    header, rest = parts(good)
    victim.refuses(crafted({**header, field: value}, rest), "version" if field == "version" else None)
    del header[field]
    victim.refuses(crafted(header, rest))


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"version":' * 50_000, b"9" * 10_000, b"{}",
], ids=lambda text: repr(text[:12]))  # fmt: skip
def test_a_header_that_is_none_is_refused(victim, good, text):
    victim.refuses(crafted(text, parts(good)[1]))


@pytest.mark.parametrize("n_header", [0, 1, 10**6, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(victim, good, n_header):
    victim.refuses(crafted(*parts(good), n_header=n_header))


def test_bytes_more_or_less_than_the_header_says_are_refused(victim, good):
    header, rest = parts(good)
    for other in (rest + b"\0", rest + rest, rest[:-1], rest[:-TINY_ROW_BYTES], b""):
        victim.refuses(crafted(header, other))


@pytest.mark.parametrize("id", [-1, 7, 2**31, 2**62, -(2**63)])
@pytest.mark.parametrize("at", [0, 3, 4])  # the last has no row yet
def test_ids_outside_the_vocabulary_are_refused(victim, good, id, at):
    header, rest = parts(good)
    victim.refuses(crafted(header, rest[: 8 * at] + id.to_bytes(8, "little", signed=True) + rest[8 * at + 8 :]))


class Crash(Exception):
    pass


def crash(*args, **kwargs):
    raise Crash


def open_that_fails_at(n_writes):
    """`open`, of which the n-th write fails after half of what it was given."""

    def failing(path, mode):
        file = builtins.open(path, mode)
        original, left = file.write, [n_writes]

        class Failing:
            def write(self, data):
                if left[0] == 0:
                    original(data[: len(data) // 2])
                    raise OSError(28, "No space left on device")
                left[0] -= 1
                return original(data)

            def __enter__(self):
                return self

            def __exit__(self, *exc_info):
                file.close()

            def __getattr__(self, name):
                return getattr(file, name)

        return Failing()

    return failing


@pytest.mark.parametrize("target, name, fault", [
    (os, "replace", crash), (os, "fsync", crash), (np, "concatenate", crash), (json, "dumps", crash),
    *[(sessionfile, "open", open_that_fails_at(n)) for n in range(6)],
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch, target, name, fault):
    sessions, path = some_sessions(), tmp_path / "file"
    sessions.save(path)
    old = path.read_bytes()
    sessions.session("a").generate([1, 2, 3, 4], 2)
    stats = sessions.stats
    for existing in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fault, raising=target is not sessionfile)
            with pytest.raises((Crash, OSError)):
                sessions.save(path)
        assert os.listdir(tmp_path) == (["file"] if existing else [])
        assert not existing or path.read_bytes() == old
        assert sessions.stats == stats
        path.unlink(missing_ok=True)
    sessions.save(path)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() != old


def test_saving_where_no_file_can_be(tmp_path):
    sessions = some_sessions()
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(OSError):
            sessions.save(path)
    assert list(tmp_path.iterdir()) == []
    assert sorted([path.name for path in tmp_path.parent.glob(tmp_path.name + "*")]) == [tmp_path.name]
    assert sessions.nbytes == 6 * TINY_ROW_BYTES


@pytest.mark.parametrize("away_s, passed_s, alive", [
    (20, 0, False), (9, 0, False), (8.75, 0, True), (8.75, 0.25, False), (0, 8.75, True), (0, 9, False),
    (-3600, 0, True), (-3600, 8.75, True), (-3600, 9, False),  # the wall clock was set back: not younger than when saved
])  # fmt: skip
def test_age_goes_on_while_a_session_is_on_disk(tmp_path, away_s, passed_s, alive):
    """Case 53, ttl 10: "a" is a second old when it is saved, and then `away_s` on disk and `passed_s` in memory."""
    some_sessions(ttl_s=10).save(tmp_path / "file")
    sessions = new_cache(ttl_s=10, now_s=-500.0, wall_s=1e9 + away_s)  # another process: its own monotonic clock
    sessions.load(tmp_path / "file")
    sessions.store.clock.now_s += passed_s
    assert ("a" in sessions) == alive
    with sessions.session("a").prefill([1, 2, 3]) as start:
        assert start.report.n_reused == (2 if alive else 0)
    assert sessions.stats.protected == 0


def test_a_file_that_has_expired_gives_nothing(tmp_path):
    some_sessions(ttl_s=10).save(tmp_path / "file")
    sessions = some_sessions(ttl_s=10, wall_s=1e9 + 20)
    sessions.load(tmp_path / "file")
    assert (sessions.nbytes, "a" in sessions, 7 in sessions) == (0, False, False)
    without_ttl = some_sessions(wall_s=1e9 + 20)
    without_ttl.load(tmp_path / "file")
    assert without_ttl.nbytes == 6 * TINY_ROW_BYTES


def test_a_session_in_use_is_saved_as_just_used(tmp_path):
    sessions = some_sessions(ttl_s=10)
    with sessions.session("a").prefill([1, 2, 3]):
        sessions.store.clock.now_s += 50
        sessions.save(tmp_path / "file")
    loaded = new_cache(ttl_s=10)
    loaded.load(tmp_path / "file")
    assert ("a" in loaded, 7 in loaded) == (True, False)


def test_a_session_that_was_refused_is_not_saved(tmp_path):
    """Nothing is held of it, also while its start is."""
    sessions = some_sessions(capacity=8 * TINY_ROW_BYTES)
    start = sessions.session("new").prefill([1] * 9)
    assert sessions.stats.refused == 1
    header, _ = parts(written(sessions, tmp_path))
    assert {entry["id"] for entry in header["sessions"]} == {"a", 7}
    start.release()


def three_sessions(*n_rows, step_s=1):
    """Sessions 0, 1, ... of so many rows each, used one after another."""
    sessions = new_cache()
    for id, n in enumerate(n_rows):
        sessions.store.clock.now_s += step_s
        sessions.session(id).prefill([id] * n).release()
    return sessions


@pytest.mark.parametrize("step_s", [1, 0])  # 0: a clock too coarse to tell them apart
def test_over_its_budget_the_most_recently_used_are_kept(tmp_path, step_s):
    sessions = three_sessions(3, 3, 3, step_s=step_s)
    sessions.store.clock.now_s += step_s
    sessions.session(0).prefill([0] * 3).release()  # the first again: the order of use is 1, 2, 0
    sessions.save(tmp_path / "file")
    for n_rows, kept in [(9, {0, 1, 2}), (8, {0, 2}), (6, {0, 2}), (5, {0}), (3, {0}), (2, set())]:
        small = new_cache(capacity=n_rows * TINY_ROW_BYTES)
        small.load(tmp_path / "file")
        assert {id for id in range(3) if id in small} == kept
        assert small.nbytes == 3 * len(kept) * TINY_ROW_BYTES
        assert small.stats.free == (n_rows - 3 * len(kept)) * TINY_ROW_BYTES
    small = new_cache(capacity=7 * TINY_ROW_BYTES)
    small.load(tmp_path / "file")
    small.session("new").prefill([6, 6, 6]).release()  # and the order is still known
    assert {id for id in (0, 1, 2, "new") if id in small} == {0, "new"}


def test_no_older_session_is_kept_in_place_of_a_newer_one(tmp_path):
    """As eviction in memory would leave them: 5 rows, then 6 do not fit beside them, and 2 that are older still."""
    three_sessions(2, 6, 5).save(tmp_path / "file")
    small = new_cache(capacity=8 * TINY_ROW_BYTES)
    small.load(tmp_path / "file")
    assert (0 in small, 1 in small, 2 in small) == (False, False, True)


def test_a_session_larger_than_the_budget_keeps_no_other_out(tmp_path):
    """As in memory: what cannot fit is not stored, and nothing has to go for it."""
    three_sessions(2, 2, 9).save(tmp_path / "file")
    small = new_cache(capacity=4 * TINY_ROW_BYTES)
    small.load(tmp_path / "file")
    assert (0 in small, 1 in small, 2 in small) == (True, True, False)


def test_a_start_that_is_held_over_a_load_is_released_without_harm(tmp_path):
    sessions = some_sessions(capacity=100 * TINY_ROW_BYTES, ttl_s=10)
    sessions.save(tmp_path / "file")
    start = sessions.session("a").prefill([1, 2, 3, 4])
    sessions.load(tmp_path / "file")
    newer = sessions.session("a").prefill([1, 2, 3, 4])
    for held in (start, newer):
        held.release()
        stats = sessions.stats
        assert min(stats.free, stats.evictable, stats.protected) >= 0
        assert stats.free + stats.evictable + stats.protected == 100 * TINY_ROW_BYTES
        cold = MODEL.prefill([1, 2, 3, 4, 5], MODEL.new_cache())
        np.testing.assert_allclose(MODEL.decode([5], held.cache), cold, rtol=1e-5, atol=1e-5)
    assert stats.protected == 0
    assert sessions.nbytes == (4 + 2) * TINY_ROW_BYTES
    sessions.store.clock.now_s += 10
    assert sessions.nbytes == 0


def test_loading_while_a_session_is_in_a_call_is_refused(tmp_path, monkeypatch):
    sessions = some_sessions()
    sessions.save(tmp_path / "file")
    inside, go_on, original, results = threading.Event(), threading.Event(), layers.Attention.__call__, []

    def attention(*args):
        if threading.current_thread() is thread and not inside.is_set():
            inside.set()
            assert go_on.wait(20)
        return original(*args)

    thread = threading.Thread(target=lambda: results.append(sessions.session("a").prefill([1, 2, 3, 4])))
    monkeypatch.setattr(layers.Attention, "__call__", attention)
    thread.start()
    try:
        assert inside.wait(20)
        before = sessions.stats
        with pytest.raises(CacheError, match="session 'a' is in a call"):
            sessions.load(tmp_path / "file")
        assert sessions.stats == before
    finally:
        go_on.set()
        thread.join(20)
    assert results[0].report.n_reused == 3
    assert sessions.nbytes == (4 + 2) * TINY_ROW_BYTES
    sessions.load(tmp_path / "file")


def test_loading_keeps_no_more_memory_than_the_rows(tmp_path):
    config = replace(TINY, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32)
    model = Transformer.random(config, precision=FP32)
    sessions = SessionCache(model)
    for id in range(4):
        sessions.session(id).prefill([id] * 256).release()
    sessions.save(tmp_path / "file")
    loaded = SessionCache(model)
    with allocations() as allocated:
        loaded.load(tmp_path / "file")
        kept, _ = allocated()
    assert loaded.nbytes == 4 * 256 * 4096
    assert kept < 1.2 * loaded.nbytes


def test_no_file_of_the_package_can_run_what_it_reads():
    """No pickle and nothing that would read one."""
    files = list(Path(npinfer.__file__).parent.rglob("*.py"))
    assert len(files) > 15
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not modules & {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib"}, path
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                assert name not in ("eval", "exec", "__import__"), path
                assert "allow_pickle" not in [keyword.arg for keyword in node.keywords], path
                numpy_load = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) == "np"
                assert not (numpy_load and name in ("load", "save", "savez")), path


def test_two_writers_of_one_file_leave_one_of_their_files(tmp_path):
    """Each writes aside under a name of its own."""
    path = tmp_path / "file"
    writers = [three_sessions(40, 50, 60), three_sessions(1, 1, 1)]
    for _ in range(10):
        threads = [threading.Thread(target=writer.save, args=[path]) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = new_cache()
        found.load(path)
        assert found.nbytes in [writer.nbytes for writer in writers]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_collision_while_loading_is_a_miss(monkeypatch, tmp_path):
    three_sessions(2, 3, 4).save(tmp_path / "file")
    cache = new_cache()
    monkeypatch.setattr(blocks, "block_key", lambda parent, ids: b"0")
    cache.load(tmp_path / "file")
    assert cache.nbytes == cache.stats.evictable > 0
    assert sum([id in cache for id in range(3)]) == 1
