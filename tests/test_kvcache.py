"""The KV cache against the plainest thing that is right: a list of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npinfer import CacheError, ConfigError, KVCache, ModelConfig, Precision, ShapeError, Transformer, kvcache
from npinfer.formats import FORMATS
from npinfer.specs import Array, spec
from strategies import batches, cached_rows, chunkings, configs, precisions, run, some_tokens

MAX_CACHES = 4


def model_config(n_layers=2, n_kv_heads=2, window=None):
    return ModelConfig(n_layers, 8, 2 * n_kv_heads, 8, 8, n_kv_heads, head_dim=4, sliding_window=window)


class Rows:
    """Every row since the beginning in a list, and the number of the first that a window has not let go of."""

    def __init__(self, window, rows=(), first=0):
        self.window, self.rows, self.first = window, list(rows), first

    def append(self, rows):
        """Add rows; returns those that the new queries may see."""
        seen = self.rows[self.first :] + rows
        self.rows += rows
        if self.window is not None:
            self.first = max(self.first, len(self.rows) - (self.window - 1))
        return seen

    def can_crop(self, length):
        """Whether rows max(0, length - W + 1) to length - 1, which the position `length` sees, are there."""
        lowest = 0 if self.window is None else max(0, length - self.window + 1)
        return length <= len(self.rows) and (length == 0 or lowest >= length or lowest >= self.first)

    def crop(self, length):
        del self.rows[length:]
        self.first = 0 if self.window is None else max(0, length - self.window + 1)

    @property
    def n_held(self):
        return len(self.rows) - self.first

    def fork(self):
        return Rows(self.window, self.rows, self.first)


class CacheAgainstAList(RuleBasedStateMachine):
    """A cache and its forks, each beside its own list; rows are told apart by a number that never comes again."""

    @initialize(
        window=st.none() | st.integers(1, 6),
        capacity=st.none() | st.integers(1, 24),
        batch=batches,
        n_layers=st.integers(1, 3),
        n_kv_heads=st.integers(1, 2),
        format_=st.sampled_from(["fp32", "fp16", "bf16"]),
    )
    def make(self, window, capacity, batch, n_layers, n_kv_heads, format_):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kvcache, "GROWTH_ROWS", 1)  # so that buffers grow and rows move often
        config = model_config(n_layers, n_kv_heads, window)
        self.row_shape = (n_layers, 2, batch, n_kv_heads, 4)
        self.row_bytes = 2 * n_layers * batch * n_kv_heads * 4 * {"fp32": 4, "fp16": 2, "bf16": 2}[format_]
        self.capacity, self.written = capacity, 0
        self.caches = [(KVCache(config, FORMATS[format_], batch, capacity), Rows(window))]

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def new_row(self):
        """A row that all formats hold as it is: small whole numbers, its own number the first of them."""
        row = np.arange(np.prod(self.row_shape), dtype=np.float32).reshape(self.row_shape) % 7
        self.written += 1
        row[..., 0], row[..., 1] = self.written % 100, self.written // 100
        return row

    def one(self, number):
        return self.caches[number % len(self.caches)]

    @rule(number=st.integers(0, MAX_CACHES), n_new=st.integers(1, 5))
    def append(self, number, n_new):
        cache, model = self.one(number)
        rows = [self.new_row() for _ in range(n_new)]
        if self.capacity is not None and len(model.rows) + n_new > self.capacity:
            for layer in range(self.row_shape[0]):
                k, v = np.stack([row[layer] for row in rows], axis=-2)
                with pytest.raises(CacheError, match=f"holds {len(model.rows)} of capacity {self.capacity} .* {n_new} more"):
                    cache.append(layer, k, v)
            with pytest.raises(CacheError, match="do not fit"):
                cache.check_room(n_new)
            return
        cache.check_room(n_new)
        visible = np.stack(model.append(rows), axis=-2)
        for layer in range(self.row_shape[0]):
            k, v = np.stack([row[layer] for row in rows], axis=-2)
            keys, values = cache.append(layer, k, v)
            assert np.array_equal(keys, visible[layer, 0])
            assert np.array_equal(values, visible[layer, 1])

    @rule(number=st.integers(0, MAX_CACHES), n_dropped=st.integers(-1, 9))
    def crop(self, number, n_dropped):
        cache, model = self.one(number)
        length = max(0, cache.length - n_dropped)
        if model.can_crop(length):
            cache.crop(length)
            model.crop(length)
        else:
            with pytest.raises(CacheError, match="crop"):
                cache.crop(length)

    @rule(number=st.integers(0, MAX_CACHES))
    def crop_to_nothing(self, number):
        cache, model = self.one(number)
        cache.crop(0)
        model.crop(0)

    @rule(number=st.integers(0, MAX_CACHES))
    def fork(self, number):
        cache, model = self.one(number)
        self.caches = [*self.caches[1 - MAX_CACHES :], (cache.fork(), model.fork())]

    @invariant()
    def length_and_bytes_are_those_of_the_rows(self):
        for cache, model in getattr(self, "caches", ()):
            assert cache.length == len(model.rows)
            assert cache.nbytes == model.n_held * self.row_bytes
            assert cache.capacity == self.capacity
            assert all(cache.n_visible(layer) == model.n_held for layer in range(self.row_shape[0]))

    @invariant()
    def rows_held_are_the_last_of_the_list(self):
        """Of every cache after every step, so that what one writes into another's rows shows at once."""
        for cache, model in getattr(self, "caches", ()):
            held = model.rows[model.first :]
            for layer in range(self.row_shape[0]):
                for part, rows in enumerate(cached_rows(cache, layer)):
                    assert rows.shape[2] == len(held)
                    assert not held or np.array_equal(rows, np.stack(held, axis=-2)[layer, part])


TestCacheAgainstAList = CacheAgainstAList.TestCase
TestCacheAgainstAList.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_fork_of_a_full_cache_and_its_parent_write_different_rows():
    """Both write position 2 of one layer: neither may find the other's row there."""
    cache = KVCache(model_config(1), FORMATS["fp32"], capacity=3)
    row = np.ones((1, 2, 2, 4), np.float32)
    cache.append(0, row, row)
    fork = cache.fork()
    keys, _ = cache.append(0, 5 * row[:, :, :1], row[:, :, :1])
    others, _ = fork.append(0, 7 * row[:, :, :1], row[:, :, :1])
    assert keys[0, 0, :, 0].tolist() == [1, 1, 5]
    assert others[0, 0, :, 0].tolist() == [1, 1, 7]


def test_a_parent_that_crops_and_writes_anew_leaves_its_fork_alone():
    cache = KVCache(model_config(1), FORMATS["fp32"])
    row = np.ones((1, 2, 3, 4), np.float32)
    cache.append(0, row, row)
    fork = cache.fork()
    cache.crop(1)
    cache.append(0, 5 * row, row)
    keys, _ = fork.append(0, 7 * row[:, :, :1], row[:, :, :1])
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 7]


@pytest.mark.parametrize("window, n_rows, length, allowed", [
    # Cropped to `length`, the next position sees rows length - W + 1 to length - 1; held are the W - 1 last of n_rows.
    (4, 3, 2, True), (4, 3, 1, True), (4, 4, 3, False), (4, 9, 8, False), (4, 9, 9, True), (4, 9, 0, True),
    (1, 5, 3, True),  # a window of one sees no row but its own
    (None, 9, 4, True), (None, 9, 10, False), (4, 9, 10, False),
])
def test_crop_is_refused_below_a_row_that_is_gone(window, n_rows, length, allowed):
    model = Transformer.random(model_config(window=window), precision=Precision(kv="fp32"))
    tokens = some_tokens(model.config, 1, n_rows + 1)
    cache = model.new_cache()
    model.prefill(tokens[:, :n_rows], cache)
    if not allowed:
        with pytest.raises(CacheError, match="crop"):
            cache.crop(length)
        length = n_rows
    else:
        cache.crop(length)
    assert cache.length == length
    cold = model.prefill(tokens[:, : length + 1], model.new_cache())
    np.testing.assert_allclose(model.decode(tokens[:, length], cache), cold, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(configs(), precisions(), batches, chunkings)
def test_bytes_are_the_stored_bytes_of_the_rows_held(config, precision, batch, chunks):
    _, cache, _ = run(Transformer.shape_only(config, precision), some_tokens(config, batch, sum(chunks)), chunks)
    n_held = sum(chunks) if config.sliding_window is None else min(sum(chunks), config.sliding_window - 1)
    element_bytes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}[precision.kv]
    scale_bytes = 2 if precision.kv == "int8" else 0  # one for each token, KV head, and K or V
    row = 2 * config.n_layers * config.n_kv_heads * (config.head_dim * element_bytes + scale_bytes)
    assert cache.nbytes == batch * n_held * row
    assert cache.fork().nbytes == cache.nbytes
    assert cache.length == cache.fork().length == sum(chunks)


def test_a_shape_only_cache_keeps_count_in_several_layers_at_once():
    cache = Transformer.shape_only(model_config(3)).new_cache(batch=2, capacity=4)
    k = Array(spec((2, 2, 3, 4), FORMATS["fp16"]))
    assert cache.append(range(3), k, k) == [None, None]
    fork = cache.fork()
    with pytest.raises(CacheError, match="3 of capacity 4"):
        cache.append(range(3), k, k)
    cache.crop(1)
    cache.append(range(3), k, k)
    assert (cache.length, fork.length) == (4, 3)
    assert cache.nbytes == 4 * 2 * 3 * 2 * 2 * 4 * 2  # rows, K and V, layers, sequences, heads, head_dim, bytes


def test_capacity_is_not_bytes_and_may_be_used_up_to_the_last_position():
    cache = KVCache(model_config(), FORMATS["fp16"], capacity=100)
    assert (cache.length, cache.nbytes, cache.capacity) == (0, 0, 100)
    row = np.zeros((1, 2, 100, 4), np.float32)
    for layer in range(2):
        cache.append(layer, row, row)
    assert cache.nbytes == 100 * 2 * 2 * 2 * 4 * 2
    with pytest.raises(CacheError, match="holds 100 of capacity 100 positions, 1 more do not fit"):
        cache.check_room(1)


@pytest.mark.parametrize("k, v", [
    ((1, 2, 3, 4), (1, 2, 2, 4)), ((2, 2, 3, 4),) * 2, ((1, 1, 3, 4),) * 2, ((1, 2, 3, 5),) * 2, ((2, 3, 4),) * 2,
])
def test_rows_of_another_shape_are_refused(k, v):
    cache = KVCache(model_config(), FORMATS["fp32"])
    with pytest.raises(ShapeError, match="append: k is .* expected"):
        cache.append(0, np.ones(k, np.float32), np.ones(v, np.float32))
    assert cache.length == cache.nbytes == 0


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_the_model_lacks_is_refused(layer):
    cache = KVCache(model_config(), FORMATS["fp32"])
    row = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(CacheError, match=f"no layer {layer}; the model has layers 0 to 1"):
        cache.append(layer, row, row)


def test_sizes_are_checked():
    model = Transformer.shape_only(model_config())
    for sizes, match in [((0, 5), "batch is 0"), ((1, 0), "capacity is 0"), ((1, 2.5), r"capacity is 2\.5"), ((True, 5), "batch")]:
        with pytest.raises(ConfigError, match=match):
            model.new_cache(*sizes)
    with pytest.raises(ConfigError, match="length is -1"):
        model.new_cache().crop(-1)
    with pytest.raises(CacheError, match="cannot keep 1 positions of 0"):
        model.new_cache().crop(1)


def test_a_cache_with_uneven_layers_is_refused():
    model = Transformer.random(model_config(), precision=Precision("fp32", "fp32", "fp32"))
    cache = model.new_cache()
    rows = np.ones((1, 2, 3, 4), np.float32)
    cache.append(0, rows, rows)
    with pytest.raises(CacheError, match=r"layers of the cache have \[0, 3\] positions"):
        model.prefill([1, 2], cache)
    cache.crop(0)
    assert model.prefill([1, 2], cache).shape == (1, 8)


@pytest.mark.parametrize("format_", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_rows_of_any_float_are_held_in_float32(format_, dtype):
    cache = KVCache(model_config(), FORMATS[format_])
    rows = np.full((1, 2, 3, 4), 1.5, dtype)
    keys, values = cache.append(np.int64(0), rows, rows)
    assert keys.dtype == values.dtype == np.float32 and (keys == 1.5).all()


def test_a_cache_of_equal_shape_and_other_weights_is_refused():
    one, other = [Transformer.random(model_config(), seed=seed) for seed in (0, 1)]
    with pytest.raises(CacheError, match="another model"):
        one.prefill([1], other.new_cache())
