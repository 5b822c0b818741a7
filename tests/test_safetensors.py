"""Checkpoints written here, byte by byte, and read back; then every way that a file can lie."""

import json
import os
import re
import struct
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as npst

from npinfer.errors import CheckpointError
from npinfer.safetensors import open_folder

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "u1"}
FORMAT = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
INDEX = "model.safetensors.index.json"


# --- a writer -------------------------------------------------------------------------------------------------------


def pack(header, values=b"", n_header=None):
    """A file of any header, true or not: a dict, text or bytes."""
    header = json.dumps(header) if isinstance(header, dict) else header
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if n_header is None else n_header) + header + values


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def encode(tensors, pad=1):
    """A true file of {name: (dtype, array)}, its header filled up with spaces to a multiple of `pad` bytes."""
    header, values = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        begin, values = len(values), values + array.astype(STORED[dtype]).tobytes()
        header[name] = entry(dtype, array.shape, [begin, len(values)])
    text = json.dumps(header)
    return pack(text + " " * (-len(text) % pad), values)


def write(folder, **files):
    """Write files into `folder`; `model` is model.safetensors, `index` its index with this weight_map, or raw bytes."""
    for name, content in files.items():
        path = folder / {"model": "model.safetensors", "index": INDEX}.get(name, f"{name}.safetensors")
        if isinstance(content, dict):
            content = json.dumps({"metadata": {}, "weight_map": content}).encode()
        path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A function that makes a new empty folder, for tests that need one for every example."""
    base = tmp_path_factory.mktemp("checkpoints")
    return lambda: type(base)(tempfile.mkdtemp(dir=base))


@pytest.fixture
def little_memory():
    """The test may not allocate more than 10 MB."""
    tracemalloc.start()
    yield
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6


# One of everything: a matrix, a scalar, no elements, each format, and a dtype that is only measured.
EVERYTHING = {
    "model.embed.weight": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "scale": ("F16", np.array(0.5, np.float16)),
    "none": ("F32", np.zeros((3, 0), np.float32)),
    "norm": ("BF16", np.array([0x3F80, 0xC000], np.uint16)),
    "position_ids": ("I64", np.arange(2)),
}


# --- what a true file gives -----------------------------------------------------------------------------------------


@st.composite
def tensor(draw):
    dtype = draw(st.sampled_from(["F32", "F16", "BF16"]))
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    return dtype, draw(npst.arrays(STORED[dtype], shapes))


checkpoints = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensor(), max_size=5)


def assert_same(opened, tensors):
    assert set(opened.names()) == set(tensors) and len(opened) == len(tensors)
    for name, (dtype, array) in tensors.items():
        stored, wide = opened.read(name), opened.float32(name)
        assert name in opened and opened.dtype(name) == FORMAT[dtype]
        assert opened.shape(name) == stored.shape == wide.shape == array.shape
        assert stored.dtype == STORED[dtype] and stored.tobytes() == array.tobytes()
        assert isinstance(wide, np.ndarray) and wide.dtype == np.float32
        assert not stored.flags.writeable


@given(tensors=checkpoints, pad=st.sampled_from([1, 8]))  # padded, values are aligned; unpadded, they may not be
def test_what_is_written_is_read_back(fresh, tensors, pad):
    assert_same(open_folder(write(fresh(), model=encode(tensors, pad))), tensors)


@given(tensors=checkpoints, data=st.data())
def test_shards_read_like_one_file(fresh, tensors, data):
    shard_of = {name: data.draw(st.sampled_from(["model-1", "model-2"])) for name in tensors}
    shards = {shard: encode({name: tensors[name] for name in tensors if shard_of[name] == shard})
              for shard in set(shard_of.values())}
    index = {name: f"{shard}.safetensors" for name, shard in shard_of.items()}
    assert_same(open_folder(write(fresh(), index=index, **shards)), tensors)


def test_a_file_written_by_hand(tmp_path):
    header = b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2],"data_offsets":[4,8]},' \
             b'"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}   '
    assert len(header) == 143
    (tmp_path / "model.safetensors").write_bytes(
        b"\x8f\0\0\0\0\0\0\0" + header + b"\x00\x00\x80\xbf" + b"\x00\x3c\x01\x00")  # 143 = 0x8f
    opened = open_folder(str(tmp_path))
    assert opened.names() == ["b", "a"] and opened.dtype("b") == "fp16" and opened.shape("a") == (1, 1)
    assert opened.float32("a").tolist() == [[-1.0]]  # sign 1, exponent 127, fraction 0
    assert opened.float32("b").tolist() == [1.0, 2.0**-24]  # 0x3c00 is 1; 0x0001 the smallest subnormal


def test_fp32_is_a_read_only_view_of_the_mapped_file(tmp_path):
    opened = open_folder(write(tmp_path, model=encode(EVERYTHING)))
    view = opened.float32("model.embed.weight")
    assert np.shares_memory(view, opened.read("model.embed.weight"))
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    del opened  # the mapping lives as long as the view
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_large_tensor_takes_no_memory_until_it_is_used(tmp_path, little_memory):
    n_values = 2**24
    write(tmp_path, model=pack({"w": entry(shape=[n_values], offsets=[0, 4 * n_values])}))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size + 4 * n_values)
    assert open_folder(tmp_path).float32("w").shape == (n_values,)


def bf16_value(bits):
    """A bfloat16 from its definition: 1 sign, 8 exponent (bias 127) and 7 fraction bits."""
    sign, exponent, fraction = -1 if bits >> 15 else 1, bits >> 7 & 255, bits & 127
    if exponent == 255:
        return sign * float("nan" if fraction else "inf")
    if exponent == 0:
        return sign * fraction * 2.0**-133  # 0.fraction * 2**-126
    return sign * (128 + fraction) * 2.0 ** (exponent - 134)  # 1.fraction * 2**(exponent - 127)


def test_every_bf16_widens_to_its_value(tmp_path):
    patterns = np.arange(2**16, dtype=np.uint16)
    wide = open_folder(write(tmp_path, model=encode({"w": ("BF16", patterns)}))).float32("w")
    np.testing.assert_array_equal(wide.tolist(), [bf16_value(bits) for bits in range(2**16)])
    assert (np.signbit(wide) == (patterns >= 2**15)).all()


def test_every_fp16_widens_to_its_value(tmp_path):
    patterns = np.arange(2**16, dtype=np.uint16)
    wide = open_folder(write(tmp_path, model=encode({"w": ("F16", patterns.view(np.float16))}))).float32("w")
    np.testing.assert_array_equal(wide, [struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(2**16)])


def test_bf16_scalars_and_empty_tensors_widen_to_arrays(tmp_path):
    tensors = {"s": ("BF16", np.array(0x3F80, np.uint16)), "e": ("BF16", np.zeros((0, 2), np.uint16))}
    opened = open_folder(write(tmp_path, model=encode(tensors)))
    assert opened.float32("s").shape == () and opened.float32("s") == 1
    assert opened.float32("e").shape == (0, 2)


@pytest.mark.parametrize("model", [pack("{}"), pack("{}   "), pack({"__metadata__": {}})])
def test_a_file_may_hold_no_tensors(tmp_path, model):
    assert open_folder(write(tmp_path, model=model)).names() == []


def test_other_dtypes_are_measured_and_refused_only_when_read(tmp_path):
    fp4 = {"packed": entry("F4", [3, 2], [0, 3])}  # 6 elements of 4 bits
    assert open_folder(write(tmp_path, model=pack(fp4, b"abc"))).dtype("packed") == "F4"
    opened = open_folder(write(tmp_path, model=encode(EVERYTHING)))
    assert opened.dtype("position_ids") == "I64" and opened.shape("position_ids") == (2,)
    for read in opened.read, opened.float32:
        with pytest.raises(CheckpointError, match="'position_ids' is stored as I64, expected F32, F16, BF16; convert"):
            read("position_ids")


def test_a_name_that_is_not_there(tmp_path):
    opened = open_folder(write(tmp_path, model=encode(EVERYTHING)))
    assert "lm_head.weight" not in opened
    for ask in opened.shape, opened.dtype, opened.read, opened.float32:
        with pytest.raises(CheckpointError, match="no tensor 'lm_head.weight' among the 5 .* config.json"):
            ask("lm_head.weight")


# --- damage at random -----------------------------------------------------------------------------------------------


def read_or_refuse(folder):
    """Use a folder in every way; anything but a `CheckpointError`, or much memory, is a failure."""
    try:
        opened = open_folder(folder)
    except CheckpointError:
        return
    for name in opened.names():
        try:
            assert opened.float32(name).shape == opened.read(name).shape == opened.shape(name)
        except CheckpointError:
            assert opened.dtype(name) not in FORMAT.values()


def test_a_file_cut_anywhere_is_refused(tmp_path, little_memory):
    whole = encode(EVERYTHING)
    for n_bytes in range(len(whole)):
        with pytest.raises(CheckpointError, match="download it"):
            open_folder(write(tmp_path, model=whole[:n_bytes]))


def test_a_header_with_one_bit_flipped_is_read_or_refused(tmp_path, little_memory):
    whole = encode(EVERYTHING)
    for bit in range(8 * (8 + int.from_bytes(whole[:8], "little"))):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        read_or_refuse(write(tmp_path, model=flipped))


@settings(max_examples=200)
@given(data=st.data())
def test_a_header_with_any_bytes_replaced_is_read_or_refused(fresh, data):
    damaged = bytearray(encode(EVERYTHING))
    places = st.integers(0, 7 + int.from_bytes(damaged[:8], "little"))
    digits_and_quotes = st.sampled_from(b'0123456789-.eE"{}[],: ')
    changes = st.dictionaries(places, st.integers(0, 255) | digits_and_quotes, min_size=1, max_size=3)
    for place, byte in data.draw(changes).items():
        damaged[place] = byte
    read_or_refuse(write(fresh(), model=damaged))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
nearly_entries = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BF16", "U8"]) | json_values,
    "shape": st.lists(st.integers(-1, 3) | json_values, max_size=3) | json_values,
    "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
})


@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), nearly_entries | json_values),
       n_values=st.integers(0, 16))
def test_any_header_is_read_or_refused(fresh, header, n_values):
    read_or_refuse(write(fresh(), model=pack(header, bytes(n_values))))


# --- lies, one at a time --------------------------------------------------------------------------------------------

EIGHT = bytes(8)
DEEP = "[" * 100_000

LIES = {
    "no bytes": (b"", "is empty; download it again"),
    "no room for the length": (bytes(7), "7 bytes .*download it"),
    "header beyond the file": (pack("{}", n_header=3), "10 bytes with a header of 3,.*download it"),
    "header of 2**64 - 1": (pack("{}", n_header=2**64 - 1), "header of 18446744073709551615"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "no header": (pack(""), "header is not a valid JSON object .*begins with b''"),
    "not UTF-8": (pack(b'{"\xff":1}'), "not a valid JSON object .*utf-8"),
    "UTF-16": (pack("{}".encode("utf-16")), "not a valid JSON object"),
    "not JSON": (pack("{a}"), "not a valid JSON object .*download it again"),
    "a list": (pack("[]"), "begins with b'\\[', expected b'{'"),
    "leading space": (pack(" {}"), "begins with b' '"),
    "two objects": (pack("{}{}"), "Extra data"),
    "deep": (pack('{"a":' + DEEP), "not a valid JSON object .*recursion"),
    "NaN": (pack('{"a": NaN}'), "NaN is not JSON"),
    "infinity": (pack('{"a": -Infinity}'), "-Infinity is not JSON"),
    "integer of 5000 digits": (pack('{"a": ' + "9" * 5000 + "}"), "not a valid JSON object"),
    "the same tensor twice": (pack('{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2), EIGHT),
                              "key 'a' appears twice"),
    "the same key twice": (pack('{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', EIGHT),
                           "key 'shape' appears twice"),
    "metadata not texts": (pack({"__metadata__": {"step": 1}}),
                           "__metadata__ is {'step': 1}, expected an object of texts"),
    "metadata a list": (pack({"__metadata__": []}), "__metadata__ is \\[\\]"),
    "entry a list": (pack({"a": []}), "tensor 'a': entry \\[\\], expected an object of dtype, shape and data_offsets"),
    "entry lacks a key": (pack({"a": {"dtype": "F32", "shape": []}}),
                          "tensor 'a': entry .*expected an object of dtype"),
    "entry with one more key": (pack({"a": entry(strides=[1])}, EIGHT),
                                "tensor 'a': entry .*expected an object of dtype"),
    "dtype unknown": (pack({"a": entry("float32")}, EIGHT),
                      "tensor 'a': unknown dtype 'float32', expected F32, F16, BF16"),
    "dtype unhashable": (pack({"a": entry(["F32"])}, EIGHT), "unknown dtype \\['F32'\\]"),
    "shape a number": (pack({"a": {**entry(), "shape": 2}}, EIGHT), "tensor 'a': shape 2, expected"),
    "dimension true": (pack({"a": entry(shape=[2, True])}, EIGHT), "shape \\[2, True\\], expected"),
    "dimension a float": (pack({"a": entry(shape=[2.0])}, EIGHT), "shape \\[2.0\\], expected"),
    "dimension negative": (pack({"a": entry(shape=[-1, -2])}, EIGHT), "shape \\[-1, -2\\], expected"),
    "dimension of 2**64": (pack({"a": entry(shape=[2**64, 0], offsets=[0, 0])}), "shape \\[18446744073709551616, 0\\]"),
    "product of 2**64": (pack({"a": entry(shape=[2**32, 2**32])}, EIGHT), "shape .*expected .* product <= 2"),
    "nothing, but huge": (pack({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}), "shape .*expected"),
    "33 dimensions": (pack({"a": entry(shape=[2] + [1] * 32)}, EIGHT), "shape .*expected at most 32"),
    "one offset": (pack({"a": entry(offsets=[8])}, EIGHT), "data_offsets \\[8\\], expected \\[begin, end\\]"),
    "three offsets": (pack({"a": entry(offsets=[0, 8, 8])}, EIGHT), "data_offsets \\[0, 8, 8\\], expected"),
    "offsets an object": (pack({"a": {**entry(), "data_offsets": {"0": 8}}}, EIGHT), "data_offsets {'0': 8}, expected"),
    "offset false": (pack({"a": entry(offsets=[False, 8])}, EIGHT), "data_offsets \\[False, 8\\], expected"),
    "offset negative": (pack({"a": entry(offsets=[-8, 0])}, EIGHT), "data_offsets \\[-8, 0\\], expected"),
    "begin after end": (pack({"a": entry(offsets=[8, 0])}, EIGHT), "data_offsets \\[8, 0\\], expected"),
    "offset of 2**64": (pack({"a": entry(offsets=[2**64, 2**64 + 8])}, EIGHT), "data_offsets .*expected"),
    "size of another shape": (pack({"a": entry(shape=[3])}, EIGHT),
                              "span 8 bytes, expected those of 3 elements of 32 bits"),
    "size of another dtype": (pack({"a": entry("BF16")}, EIGHT),
                              "span 8 bytes, expected those of 2 elements of 16 bits"),
    "size of an unread dtype": (pack({"a": entry("I64")}, EIGHT),
                                "span 8 bytes, expected those of 2 elements of 64 bits"),
    "half a byte": (pack({"a": entry("F4", [3], [0, 1])}, b"a"),
                    "span 1 bytes, expected those of 3 elements of 4 bits"),
    "a terabyte": (pack({"a": entry(shape=[2**40], offsets=[0, 2**42])}, EIGHT),
                   "bytes, expected 439804651.* to the end of tensor 'a'; incomplete, download it again"),
    "one byte short": (pack({"a": entry()}, bytes(7)), "to the end of tensor 'a'; incomplete"),
    "overlap": (pack({"b": entry(offsets=[4, 12]), "a": entry()}, bytes(12)), "'b' overlaps tensor 'a' by 4 bytes"),
    "the same bytes": (pack({"a": entry(), "b": entry()}, EIGHT), "tensor 'b' overlaps tensor 'a' by 8 bytes"),
    "gap at the start": (pack({"a": entry(offsets=[4, 12])}, bytes(12)),
                         "4 bytes between the header and tensor 'a' belong to no"),
    "gap": (pack({"a": entry(), "b": entry(offsets=[9, 17])}, bytes(17)),
            "1 bytes between tensor 'a' and tensor 'b' belong"),
    "more at the end": (pack({"a": entry()}, bytes(11)), "3 bytes after tensor 'a' belong to no tensor"),
    "values without tensors": (pack("{}", b"?"), "1 bytes after the header belong to no tensor"),
}


@pytest.mark.parametrize("model, message", LIES.values(), ids=LIES.keys())
def test_a_lie_is_refused(tmp_path, little_memory, model, message):
    write(tmp_path, model=model)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path))}.model.safetensors: .*{message}") as refused:
        open_folder(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < len(str(tmp_path)) + 400


def test_a_header_over_the_limit_is_refused_unread(tmp_path, little_memory):
    write(tmp_path, model=pack("{", n_header=100_000_001))
    os.truncate(tmp_path / "model.safetensors", 200_000_000)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="header of 100000001, expected .* in 100000000"):
        open_folder(tmp_path)


def test_long_names_keep_the_message_short(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        open_folder(write(tmp_path, model=pack({"a" * 100_000: {"b" * 100_000: [[[[[[[[[[1]]]]]]]]] * 1000]}})))
    assert len(str(refused.value)) < len(str(tmp_path)) + 1000


# --- folders and indexes --------------------------------------------------------------------------------------------

ONE = encode({"a": ("F32", np.ones(2))})
TWO = encode({"b": ("F32", np.zeros(1)), "c": ("F32", np.zeros(1))})
HELD = {"one.safetensors": {"a"}, "two.safetensors": {"b", "c"}}
TRUE_INDEX = {name: shard for shard, names in HELD.items() for name in sorted(names)}


def test_one_file_of_any_name_will_do(tmp_path):
    (tmp_path / "._weights.safetensors").write_bytes(b"left by a copy from another system")
    assert open_folder(write(tmp_path, weights=ONE)).names() == ["a"]


def test_model_is_preferred_among_several(tmp_path):
    assert open_folder(write(tmp_path, consolidated=TWO, model=ONE)).names() == ["a"]


def test_the_index_is_preferred_to_a_single_file(tmp_path):
    folder = write(tmp_path, index=TRUE_INDEX, one=ONE, two=TWO, model=b"not looked at")
    assert open_folder(folder).names() == ["a", "b", "c"]


def test_a_link_to_a_file_elsewhere_is_followed(tmp_path):
    (tmp_path / "blob").write_bytes(ONE)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert open_folder(tmp_path / "snapshot").names() == ["a"]


def test_several_files_need_an_index(tmp_path):
    with pytest.raises(CheckpointError, match=f"2 \\*.safetensors but no {INDEX} .*'one.*download the index too"):
        open_folder(write(tmp_path, one=ONE, two=TWO))


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no \\*.safetensors, expected model.safetensors.*download"):
        open_folder(tmp_path)


def test_a_file_in_place_of_the_folder(tmp_path):
    with pytest.raises(CheckpointError, match=f"is a file, expected a folder; give {re.escape(str(tmp_path))}$"):
        open_folder(write(tmp_path, model=ONE) / "model.safetensors")


@pytest.mark.parametrize("name", ["absent", "zero\0byte", "\ud800"])
def test_a_folder_that_cannot_be(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be opened .*expected the folder of a checkpoint, check the path"):
        open_folder(tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "one.safetensors"])
def test_what_is_not_a_file(tmp_path, name):
    write(tmp_path, **({"index": TRUE_INDEX, "two": TWO} if name == "one.safetensors" else {}))
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: is not a file, but a folder"):
        open_folder(tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(name)  # a link to itself
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read .*check its permissions"):
        open_folder(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a file"):
        open_folder(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_what_may_not_be_read(tmp_path):
    write(tmp_path, model=ONE)
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read .*check its permissions"):
        open_folder(tmp_path)
    tmp_path.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="cannot be opened"):
            open_folder(tmp_path)
    finally:
        tmp_path.chmod(0o700)


BAD_INDEXES = {
    "empty": (b"", "index.json: is empty"),
    "not JSON": (b"{weight_map}", "index is not a valid JSON object"),
    "deep": (b'{"weight_map":' + DEEP.encode(), "index is not a valid JSON object .*recursion"),
    "a list": (b"[]", "index is not a valid JSON object"),
    "no weight_map": (b"{}", "weight_map is None, expected an object"),
    "weight_map a list": (b'{"weight_map": ["a"]}', "weight_map is \\['a'\\], expected an object"),
    "shard a number": ({**TRUE_INDEX, "a": 1}, "weight_map is .*expected an object of tensor name: file name"),
    "a tensor twice": (b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "key 'a' appears twice"),
    "shard absent": ({**TRUE_INDEX, "a": "three.safetensors"}, "three.safetensors: cannot be read .*; download it"),
    "shard with a zero byte": ({**TRUE_INDEX, "a": "one\0"}, "cannot be read"),
    "shard damaged": ({"a": "bad.safetensors"}, "bad.safetensors: 7 bytes"),
    "tensor missing": ({**TRUE_INDEX, "d": "two.safetensors"},
                       "two.safetensors: lacks tensor 'd', which .*index.json expects in 'two.safetensors'; download"),
    "tensor not listed": ({"a": "one.safetensors", "b": "two.safetensors"},
                          "two.safetensors: holds tensor 'c', which .* expects in no shard; download the index"),
    "tensor in two shards": ({**TRUE_INDEX, "d": "again.safetensors"},
                             "again.safetensors: holds tensor 'a', which .* expects in 'one.safetensors'"),
}


@pytest.mark.parametrize("index, message", BAD_INDEXES.values(), ids=BAD_INDEXES.keys())
def test_a_bad_index_is_refused(tmp_path, index, message):
    again = encode({"a": ("F32", np.ones(2)), "d": ("F32", np.ones(1))})
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path))}.*{message}"):
        open_folder(write(tmp_path, index=index, one=ONE, two=TWO, again=again, bad=bytes(7)))


@given(index=st.dictionaries(st.sampled_from("abc"), st.sampled_from(sorted(HELD)) | json_values))
def test_an_index_is_believed_if_it_places_what_its_shards_hold(fresh, index):
    true = all(shard in list(HELD) and {name for name in index if index[name] == shard} == HELD[shard]
               for shard in index.values())
    folder = write(fresh(), index=index, one=ONE, two=TWO)
    if true:
        assert set(open_folder(folder).names()) == set(index)
    else:
        with pytest.raises(CheckpointError):
            open_folder(folder)


@pytest.mark.parametrize("shard", ["../one.safetensors", "sub/one.safetensors", "./one.safetensors",
                                   "{up}/one.safetensors", "sub\\one.safetensors", "C:one.safetensors", "..", ".", ""])
def test_a_shard_lies_in_the_folder(tmp_path, shard):
    for folder in tmp_path, tmp_path / "model", tmp_path / "model" / "sub":
        folder.mkdir(exist_ok=True)
        write(folder, one=ONE)  # the files are there: the name is the fault
    index = {"a": shard.format(up=tmp_path)}
    with pytest.raises(CheckpointError, match="names the shard .*expected a file name without a folder; correct"):
        open_folder(write(tmp_path / "model", index=index))
