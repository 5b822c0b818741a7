"""Three counts of the same run are equal, to the integer.

The ledger of a numeric run, the ledger of a shape-only run, and the closed
forms, which see the config and never run anything.  Then the closed forms on
arrays, the anchors that every build must show, and the hand-worked cases.
"""

import threading
from contextvars import copy_context
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import npinfer
from costmodel import formulas, loads, operations
from costmodel.formulas import decode_counts_total, forward_counts, sample_counts
from npinfer import Counts, InputError, Ledger, ModelConfig, Precision, Transformer, generate, preset
from npinfer.ledger import forward, in_layers, record
from strategies import FP32, T1, batches, chunkings, configs, precisions, run, some_tokens

MISTRAL = preset("mistral-7b")
SMALL = settings(max_examples=40)


def counted_forwards(chunks, n_decoded):
    """(phase, n_cached, n_new) of each forward of `strategies.run`."""
    forwards, n_cached = [], 0
    for phase, n_new in [("prefill", n) for n in chunks] + [("decode", 1)] * n_decoded:
        forwards.append((phase, n_cached, n_new))
        n_cached += n_new
    return forwards


def closed_by_operation(config, precision, batch, chunks, n_decoded, all_logits):
    """(phase, op) -> Counts of a run, from the closed forms of its forwards."""
    by_operation = {}
    for phase, n_cached, n_new in counted_forwards(chunks, n_decoded):
        load = loads.forward_load(config, precision, batch, n_cached, n_new, all_logits and phase == "prefill")
        for op, counts in operations.operation_counts(config, precision, load).items():
            by_operation[phase, op] = by_operation.get((phase, op), Counts()) + counts
    return by_operation


def counts_of(grouped):
    return {key: counts for key, (_, counts) in grouped.items()}


def total(parts):
    return sum(parts, Counts())


# ---- ledger, shape-only ledger, closed form


@SMALL
@given(configs(), precisions(numeric=True), batches, chunkings, st.integers(0, 3), st.booleans())
def test_numeric_run_shape_only_run_and_closed_form_agree(config, precision, batch, chunks, n_decoded, all_logits):
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    request = tokens, chunks, n_decoded, all_logits
    numeric, *_ = run(Transformer.random(config, precision=precision), *request)
    shapes, *_ = run(Transformer.shape_only(config, precision), *request)
    assert numeric.by("phase", "forward", "op") == shapes.by("phase", "forward", "op")
    closed = closed_by_operation(config, precision, batch, chunks, n_decoded, all_logits)
    assert counts_of(numeric.by("phase", "op")) == closed


@SMALL
@given(configs(), precisions(), batches, chunkings, st.integers(0, 3), st.booleans())
def test_shape_only_run_and_closed_form_agree_in_every_format(config, precision, batch, chunks, n_decoded, all_logits):
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    ledger, cache, _ = run(Transformer.shape_only(config, precision), tokens, chunks, n_decoded, all_logits)
    closed = closed_by_operation(config, precision, batch, chunks, n_decoded, all_logits)
    assert counts_of(ledger.by("phase", "op")) == closed
    by_forward = [counts for _, counts in ledger.by("forward").values()]
    assert by_forward == [
        forward_counts(config, precision, batch, n_cached, n_new, all_logits and phase == "prefill")
        for phase, n_cached, n_new in counted_forwards(chunks, n_decoded)
    ]
    assert ledger.total() == total(by_forward)
    assert cache.nbytes == formulas.kv_bytes_held(config, precision, cache.length, batch)


@pytest.mark.parametrize("weights, d_model", [("int4", 300), ("int4", 128), ("int8", 129), ("fp8", 5)])
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_scales_of_rows_wider_than_a_group(weights, d_model, kv):
    """The strategies' rows are shorter than int4's group of 128; these are not."""
    config = ModelConfig(n_layers=2, d_model=d_model, n_heads=2, head_dim=6, d_ff=257, vocab_size=7, qkv_bias=True)
    precision = Precision(weights=weights, kv=kv)
    ledger, *_ = run(Transformer.shape_only(config, precision), some_tokens(config, 2, 4), [3], 1)
    assert counts_of(ledger.by("phase", "op")) == closed_by_operation(config, precision, 2, [3], 1, False)


@pytest.mark.parametrize("bits", [4.1234567, 4.1234568, 4.831234567890123])
def test_mixed_formats_that_differ_in_a_late_digit_stay_apart(bits):
    precision = Precision(bits_per_weight=bits)
    ledger, *_ = run(Transformer.shape_only(MISTRAL, precision), some_tokens(MISTRAL, 1, 3), [3])
    assert ledger.total() == forward_counts(MISTRAL, precision, 1, 0, 3)


@given(configs(), precisions(), batches, st.integers(1, 9), st.integers(1, 9))
def test_decode_total_is_the_sum_of_its_steps(config, precision, batch, n_prompt, n_output):
    whole = decode_counts_total(config, precision, batch, n_prompt, n_output)
    steps = [forward_counts(config, precision, batch, n_prompt + step, 1) for step in range(n_output - 1)]
    assert whole == total(steps)
    ledger, *_ = run(Transformer.shape_only(config, precision), np.zeros((batch, n_prompt + n_output), int), [n_prompt], n_output - 1)
    assert ledger.total(phase="decode") == whole


@SMALL
@given(configs(), precisions(numeric=True), batches, st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_generate_is_a_prefill_its_decode_and_a_sample_after_each(config, precision, batch, n_prompt, n_output, numeric):
    model = Transformer.random(config, precision=precision) if numeric else Transformer.shape_only(config, precision)
    with Ledger() as ledger:
        generate(model, some_tokens(config, batch, n_prompt), n_output)
    sample = sample_counts(config, precision, batch)
    assert ledger.total(phase="prefill") == forward_counts(config, precision, batch, 0, n_prompt) + sample
    decode = decode_counts_total(config, precision, batch, n_prompt, n_output)
    assert ledger.total(phase="decode") == decode + sample * (n_output - 1)
    assert ledger.by("op")["sample",] == (n_output, sample * n_output)
    # The first step is on n_prompt cached positions, the last on n_prompt + n_output - 2.
    forwards = list(counts_of(ledger.by("forward")).values())
    assert len(forwards) == n_output
    for step in {1, n_output - 1} - {0, n_output}:
        assert forwards[step] == forward_counts(config, precision, batch, n_prompt + step - 1, 1) + sample


@given(configs(), precisions(), batches, st.integers(0, 9), st.integers(1, 2**40), st.booleans())
@example(T1, FP32, 1, 0, 2**30, False)  # costs about 2**62 or beyond leave the int64 product for Python ints
@example(MISTRAL, Precision(), 3, 0, 2**23, True)
def test_costs_of_operations_are_those_of_their_counts(config, precision, batch, n_cached, n_new, all_logits):
    load = loads.forward_load(config, precision, batch, n_cached, n_new, all_logits)
    expected = [
        [
            counts.matmul_flops - counts.masked_flops,
            counts.elementwise_flops,
            counts.weight_bytes_read + counts.kv_bytes_read + counts.kv_bytes_written,
            counts.weight_bytes_read + counts.kv_bytes_read + counts.kv_bytes_written
            + counts.activation_bytes_read + counts.activation_bytes_written,
        ]
        for counts in operations.operation_counts(config, precision, load).values()
    ]
    assert operations.operation_costs(config, precision, load) == expected


# ---- what a ledger sums


@SMALL
@given(configs(), precisions(), chunkings, st.integers(0, 2))
def test_parts_of_a_ledger_add_up_to_the_whole(config, precision, chunks, n_decoded):
    tokens = some_tokens(config, 2, sum(chunks) + n_decoded)
    ledger, *_ = run(Transformer.shape_only(config, precision), tokens, chunks, n_decoded)
    ops = {op for (op,) in ledger.by("op")}
    outside = {"embed", "final_norm", "lm_head"}
    by_layer = [ledger.total(layer=layer) for layer in range(config.n_layers)]
    assert total(by_layer) + total(ledger.total(op=op) for op in outside) == ledger.total()
    assert total(ledger.total(op=op) for op in ops) == ledger.total()
    assert ledger.total(phase="prefill") + ledger.total(phase="decode") == ledger.total()
    assert ledger.total(layer=config.n_layers) == Counts()
    assert len(set(by_layer)) == 1  # all layers have one shape here
    for op in ops - outside:
        assert ledger.total(op=op, layer=0) * config.n_layers == ledger.total(op=op)
        calls = (2 if op == "rope" else 1) * config.n_layers * (len(chunks) + n_decoded)
        assert ledger.by("op")[op,][0] == calls


def test_every_active_ledger_gets_every_entry():
    model = Transformer.random(T1)
    cache = model.new_cache()
    with Ledger() as outer:
        model.prefill([1, 2], cache)
        with Ledger() as inner, Ledger() as twin:
            model.decode([3], cache)
        model.decode([4], cache)
    model.decode([5], cache)
    assert list(inner.entries()) == list(twin.entries())
    assert inner.total() == forward_counts(T1, Precision(), 1, 2, 1)
    assert outer.total() == total(forward_counts(T1, Precision(), 1, *sizes) for sizes in [(0, 2), (2, 1), (3, 1)])
    with inner:  # entered again, it goes on where it stopped
        model.decode([6], cache)
    assert inner.total() == total(forward_counts(T1, Precision(), 1, n_cached, 1) for n_cached in (2, 5))
    assert [counts for _, counts in inner.by("forward").values()][1] == forward_counts(T1, Precision(), 1, 5, 1)


def test_entries_are_in_the_order_things_ran():
    """Also those behind an inner ledger, or an inner forward, that has ended."""
    lines = {op: ((op, Counts()),) for op in "abcdefgh"}
    with Ledger() as outer:
        record(lines["a"])
        with Ledger() as inner:
            record(lines["b"])
        record(lines["c"])
        with forward("prefill"):
            record(lines["d"])
            with forward("decode"):
                record(lines["e"])
            record(lines["f"])
        record(lines["g"])
        with inner:
            record(lines["h"])
    assert [entry.op for entry in outer.entries()] == list("abcdefgh")
    assert [entry.op for entry in inner.entries()] == ["b", "h"]
    assert [entry.phase for entry in outer.entries()] == [None] * 3 + ["prefill", "decode", "prefill"] + [None] * 2


def test_layers_of_a_copied_context_are_its_own():
    with Ledger() as ledger, forward("decode"):
        in_layers(range(1))
        copy_context().run(in_layers, range(1, 2))
        record((("a", Counts()),))
    assert [entry.layers for entry in ledger.entries()] == [range(1)]
    copy_context().run(in_layers, range(1, 2))  # outside of any forward
    with Ledger() as ledger:
        record((("a", Counts()),))
    assert [entry.layers for entry in ledger.entries()] == [None]


def test_a_ledger_does_not_see_other_threads():
    model = Transformer.shape_only(T1)
    with Ledger() as ledger:
        thread = threading.Thread(target=lambda: model.prefill([1, 2], model.new_cache()))
        thread.start()
        thread.join()
    assert list(ledger.entries()) == []


# ---- closed forms on arrays


@given(
    configs(), precisions(),
    st.lists(batches, min_size=1, max_size=2), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 9),
    st.booleans(),
)
@example(T1, Precision(bits_per_weight=4.831234567890123), [1], [0], 10**7, False)  # 17 digits: products pass 2**63
def test_arrays_equal_the_scalar_calls_point_by_point(config, precision, batch, n_cached, n_new, all_logits):
    rows, columns = np.array(batch)[:, None], np.array(n_cached, np.int32)
    forward = forward_counts(config, precision, rows, columns, n_new, all_logits)
    decode = decode_counts_total(config, precision, rows, columns + 1, np.int64(n_new))
    for field in (*forward, *decode):
        assert field.shape == (len(batch), len(n_cached))
        assert field.dtype == np.int64
    for i, b in enumerate(batch):
        for j, c in enumerate(n_cached):
            assert Counts(*[field[i, j] for field in forward]) == forward_counts(config, precision, b, c, n_new, all_logits)
            assert Counts(*[field[i, j] for field in decode]) == decode_counts_total(config, precision, b, c + 1, n_new)


def largest_that_fits(count):
    """The largest argument for which `count` stays below 2**63, by bisection on Python ints."""
    low, high = 1, 2**62
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if max(count(middle)) < 2**63 else (low, middle)
    return low


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("precision", [Precision(), Precision(weights="int8", kv="int8"), Precision(bits_per_weight=4.83)])
@pytest.mark.parametrize("form", [
    lambda config, precision, n: forward_counts(config, precision, n, 10, 10),
    lambda config, precision, n: forward_counts(config, precision, 1, n, 1),
    lambda config, precision, n: forward_counts(config, precision, 1, 5, n, all_logits=True),
    lambda config, precision, n: decode_counts_total(config, precision, 1, 5, n),
], ids=["batch", "n_cached", "n_new", "n_output"])
def test_arrays_are_exact_up_to_the_boundary_and_refused_beyond(form, precision, window):
    config = MISTRAL if window is None else preset("mistral-7b-v0.1")
    count = partial(form, config, precision)
    fits = largest_that_fits(count)
    assert [field.tolist() for field in count(np.array([fits, 1]))] == [list(both) for both in zip(count(fits), count(1))]
    if fits < 2**62 - 1:  # a window's counts stop growing with n_cached
        with pytest.raises(OverflowError, match="does not hold"):
            count(np.array([1, fits + 1]))
    assert all(type(field) is int for field in count(fits + 1))


def test_scalars_beyond_int64_stay_exact():
    counts = forward_counts(T1, FP32, 1, 0, 10**12)
    # Layers 3,840 FLOPs per token each, the head 1,024 once, 128 for each pair of the rectangle.
    assert counts.matmul_flops == 10**12 * 2 * 3840 + 1024 + 128 * 10**24
    assert counts.masked_flops == 128 * (10**24 - 10**12 * (10**12 + 1) // 2)
    assert all(type(field) is int for field in forward_counts(T1, FP32, np.int64(2**62), np.array(3), np.int32(5)))


@pytest.mark.parametrize("form, arguments", [
    (lambda n: sample_counts(MISTRAL, Precision(), n), 2**60),
    (lambda n: formulas.kv_bytes_read(MISTRAL, Precision(), n), 2**60),
    (lambda n: formulas.kv_bytes_held(MISTRAL, Precision(), n), 2**60),
    (lambda n: formulas.prefill_flops_rough(1, n, 7_110_660_096), 10**9),
    (lambda n: formulas.decode_flops_rough(1, n, 7_110_660_096), 10**9),
], ids=["sample_counts", "kv_bytes_read", "kv_bytes_held", "prefill_flops_rough", "decode_flops_rough"])
def test_no_count_of_an_array_wraps(form, arguments):
    with pytest.raises(OverflowError):
        form(np.array([arguments]))


def test_arrays_given_by_name_do_not_wrap_either():
    with pytest.raises(OverflowError, match="forward_counts"):
        forward_counts(MISTRAL, Precision(), batch=1, n_cached=0, n_new=np.array([2**50]))


def test_numpy_scalars_count_as_python_ints():
    big = np.int64(2**40)
    assert formulas.prefill_flops_rough(big, big, np.int64(7)) == 14 * 2**80
    assert formulas.decode_flops_rough(big, big, np.int64(7)) == 14 * 2**80
    assert formulas.prefix_saving(np.array([2**62]), np.array([2**62])).tolist() == [0.5]


@pytest.mark.parametrize("form", [formulas.kv_bytes_read, formulas.kv_bytes_held])
@pytest.mark.parametrize("n_context, batch, match", [(5, -1, "batch is -1"), (-5, 1, "n_context is -5"), (5, 1.0, r"batch is 1\.0")])
def test_kv_bytes_refuse(form, n_context, batch, match):
    with pytest.raises(InputError, match=match):
        form(MISTRAL, Precision(), n_context, batch)


@pytest.mark.parametrize("arguments, match", [
    ((0, 0, 1), "batch is 0, expected at least 1"),
    ((1, -1, 1), "n_cached is -1, expected at least 0"),
    ((1, 0, 0), "n_new is 0, expected at least 1"),
    ((1, 0, np.array([3, -2])), "n_new is -2, expected at least 1"),
    ((1, 0, 2.0), r"n_new is 2\.0, expected a whole number"),
    ((1, np.array([1.0]), 1), "n_cached is an array of float64, expected integers"),
    ((np.array([True]), 0, 1), "batch is an array of bool, expected integers"),
    (("1", 0, 1), "batch is '1', expected a whole number"),
    ((1, [0, 1], 1), "n_cached is .*, expected a whole number or an integer array"),
])
def test_forward_counts_refuses(arguments, match):
    with pytest.raises(InputError, match=match):
        forward_counts(T1, FP32, *arguments)


@pytest.mark.parametrize("arguments, match", [
    ((1, 0, 2), "n_prompt is 0"), ((1, 5, 0), "n_output is 0"), ((1, 5, 1.5), r"n_output is 1\.5"), ((-1, 5, 2), "batch is -1"),
])
def test_decode_counts_total_refuses(arguments, match):
    with pytest.raises(InputError, match=match):
        decode_counts_total(T1, FP32, *arguments)


# ---- anchors and hand-worked cases


def test_mistral_7b_anchors():
    fp16 = Precision()
    assert formulas.n_parameters(MISTRAL) == 7_241_732_096
    assert formulas.n_streamed_parameters(MISTRAL) == 7_110_660_096
    assert formulas.kv_elements_per_token(MISTRAL) == 65_536
    assert formulas.kv_bytes_per_token(MISTRAL, fp16) == 131_072
    assert formulas.weight_bytes(MISTRAL, fp16, streamed=True) == 14_221_320_192
    assert formulas.weight_bytes(MISTRAL, fp16) == 2 * 7_241_732_096

    ledger, *_ = run(Transformer.shape_only(MISTRAL), np.zeros((1, 1001), int), [1000], 1)
    prefill, decode = ledger.total(phase="prefill"), ledger.total(phase="decode")
    assert prefill.matmul_flops == 14_483_193_856_000
    assert prefill.masked_flops == 261_881_856_000
    assert prefill.weight_bytes_read == 14_221_320_192 + 1000 * 8192
    assert prefill.kv_bytes_written == 131_072_000
    assert decode.matmul_flops == 14_745_600_000
    assert decode.masked_flops == 0
    assert decode.weight_bytes_read == 14_221_320_192 + 8192
    assert decode.kv_bytes_read == 1001 * 131_072

    floor_s = formulas.tpot_floor_s(formulas.weight_bytes(MISTRAL, fp16, streamed=True), 1008e9)
    assert round(floor_s * 1e3, 1) == 14.1
    eight_bit = Precision(weights="fp8")
    # The matrices' 8 bits; the 65 gains of 4,096 stay at 16.
    assert formulas.weight_bytes(MISTRAL, eight_bit, streamed=True) == 7_110_660_096 + 65 * 4096
    assert round(formulas.weight_bytes(MISTRAL, eight_bit, streamed=True) / 1008e9 * 1e3, 2) == 7.05


def test_case_44_attention_counts_the_cached_prefix():
    assert loads.visible_pairs(64, 16) == 1160  # 16 * 64 + 16 * 17 / 2
    counts = forward_counts(T1, FP32, 1, 64, 16)
    pair = 128  # FLOPs in both layers
    assert counts.masked_flops == (16 * 80 - 1160) * pair == 120 * 128
    assert counts.needed_flops == 16 * 2 * 3840 + 1024 + 1160 * pair
    # KV rows read in a layer and call: the 64 of the prefix and the 16 new ones, once, not once for each query.
    assert counts.kv_bytes_read == (64 + 16) * 128
    assert forward_counts(T1, FP32, 1, 0, 16).kv_bytes_read + 64 * 128 == counts.kv_bytes_read

    # Two sequences of 2 and 3 tokens: 3 + 6 pairs, not the 15 of one of 5.
    apart = forward_counts(T1, FP32, 1, 0, 2).needed_flops + forward_counts(T1, FP32, 1, 0, 3).needed_flops
    assert apart == 5 * 7680 + 2 * 1024 + 9 * pair
    # A batch is that many sequences of their own.
    assert forward_counts(T1, FP32, 3, 6, 3).masked_flops == 3 * 384

    ledger, *_ = run(Transformer.random(T1, precision=FP32), some_tokens(T1, 1, 9), [6, 3])
    warm = list(ledger.by("forward").values())[1][1]
    assert (warm.needed_flops, warm.matmul_flops, warm.masked_flops) == (27_136, 27_520, 384)


def test_case_47_grouped_and_gated_projections():
    ledger, *_ = run(Transformer.random(T1, precision=FP32), some_tokens(T1, 1, 1), [1])
    per_layer = {op: ledger.total(op=op, layer=1).matmul_flops for (op,) in ledger.by("op")}
    assert per_layer["k_proj"] == per_layer["v_proj"] == 256  # 2 * 16 * 8: of the 2 KV heads
    assert per_layer["gate_proj"] + per_layer["up_proj"] + per_layer["down_proj"] == 2304
    wide = ModelConfig(n_layers=1, d_model=24, n_heads=4, head_dim=8, d_ff=8, vocab_size=8)
    ledger, *_ = run(Transformer.shape_only(wide), some_tokens(wide, 1, 1), [1])
    assert ledger.total(op="q_proj").matmul_flops == 2 * 24 * 32


def test_case_48_kv_bytes_are_those_of_the_kv_heads():
    assert formulas.kv_bytes_per_token(T1, FP32) == 128
    assert formulas.kv_bytes_per_token(preset("smollm2-135m"), FP32) == 46_080
    model = Transformer.random(T1, precision=FP32)
    cache = model.new_cache()
    with Ledger() as ledger:
        model.prefill([1, 2, 3], cache)
    row = np.zeros((1, 2, 1, 4), np.float32)
    arrays = [part[:, :, :-1] for layer in (0, 1) for part in cache.fork().append(layer, row, row)]
    assert cache.nbytes == ledger.total().kv_bytes_written == sum(array.nbytes for array in arrays) == 3 * 128


def test_case_49_head_dim_is_the_declared_one():
    config = ModelConfig(n_layers=1, d_model=24, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=8, vocab_size=8)
    assert formulas.kv_bytes_per_token(config, FP32) == 128  # 2 * 2 * 8 * 4; a head of 24 / 4 would give 96
    _, cache, _ = run(Transformer.random(config, precision=FP32), some_tokens(config, 1, 5), [5])
    assert cache.nbytes == 5 * 128


def test_int8_kv_bytes_include_a_scale_for_each_head():
    config, precision = MISTRAL, Precision(kv="int8")
    assert formulas.kv_bytes_per_token(config, precision) == 2 * 32 * 8 * (128 + 2)


def test_a_window_bounds_what_a_step_reads():
    """Window 4096 of Mistral-7B-v0.1: from then on every step reads the same."""
    config = preset("mistral-7b-v0.1")
    steps = [forward_counts(config, Precision(), 1, n_cached, 1).kv_bytes_read for n_cached in (4094, 4095, 4096, 9000)]
    assert steps == [4095 * 131_072] + [4096 * 131_072] * 3
    assert npinfer.Transformer.shape_only(config).new_cache().nbytes == 0


def test_a_ledger_entered_twice_counts_once():
    model = Transformer.shape_only(T1, FP32)
    with Ledger() as ledger, ledger:
        model.prefill([1, 2, 3], model.new_cache())
    assert ledger.total() == forward_counts(T1, FP32, 1, 0, 3)


def test_a_phase_that_is_none_is_not_free():
    with pytest.raises(InputError, match="phase is 'Decode', expected 'prefill' or 'decode'"):
        Ledger().total(phase="Decode")
