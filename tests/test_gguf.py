"""GGUF files: what is read from them, how it is counted, and what is refused.

The files are written by the gguf package, from weights in the layout of a
published Llama checkpoint, the way its converter writes them.
"""

from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import npinfer
from npinfer import CheckpointError, ConfigError, InputError, ModelConfig, Precision, Transformer
from npinfer.formats import FORMATS
from npinfer.gguf_file import FORMATS_READ, open_gguf
from npinfer.gguf_model import read_gguf
from npinfer.layouts import half_split
from npinfer.scaling import FactorScaling
from npinfer.scaling import LinearScaling, RopeScaling
from npinfer.tensors import layer_tensors, model_tensors
from npinfer.seeded import random_source
from strategies import FP32, some_tokens

gguf = pytest.importorskip("gguf", reason='the gguf package is not installed: pip install "npinfer[gguf]"')

# Rows of 256 and 512, blocks of the K-types; head_dim 64, n_kv_heads 2.
CONFIG = ModelConfig(
    n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, d_ff=512, vocab_size=19, max_context=77,
    rope_theta=5000.0, norm_eps=1e-6, eos_token_ids=(2,),
)  # fmt: skip
SMALL = replace(CONFIG, n_layers=1, d_model=8, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12, vocab_size=5)
NAMES = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"} | {
    "attn_norm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "mlp_norm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def tensors_of(config, source=random_source(0)):
    """(our name, layer, values) of every tensor, in the layout of the model; `source` is asked in this order."""
    tensors = [(name, None, source(name, None, shape)) for name, shape in model_tensors(config).items()]
    for layer, kind in enumerate(config.kinds):
        tensors += [(name, layer, source(name, layer, shape)) for name, shape in layer_tensors(config, kind).items()]
    return tensors


def file_name(name, layer):
    name, _, bias = name.partition(".")
    return f"{'' if layer is None else f'blk.{layer}.'}{NAMES[name]}.{bias or 'weight'}"


def interleaved(rows, n_heads):
    """As llama.cpp's converter permutes query and key rows: row i of the first half of a head goes to 2i."""
    return rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path, config=CONFIG, types=lambda name, layer: "F32", keys=(), change=None, source=None):
    """Write a GGUF file; `keys` replace metadata (None takes one away), `change` may alter {name: values}."""
    metadata = {
        "llama.block_count": config.n_layers,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_ff,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.rope_dim,
        "llama.context_length": config.max_context,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
    } | dict(keys)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)  # which lays the tensors out by it, too
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            add[type(value)](key, value)
    tensors = {}
    for name, layer, values in tensors_of(config, source or random_source(0)):
        heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.partition(".")[0])
        tensors[file_name(name, layer)] = types(name, layer), values if heads is None else interleaved(values, heads)
    if change:
        change(tensors)
    for name, (kind, values) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind]
        plain = kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(name, stored(values, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(values, kind):
    """The values in blocks of a type; for K-types, which the package cannot make, random codes with a usual scale."""
    if kind.name not in ("Q4_K", "Q6_K"):
        return gguf.quants.quantize(values, kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_blocks = values.shape[-1] // per_block
    shape = *values.shape[:-1], n_blocks, block_bytes
    blocks = np.random.default_rng(shape).integers(256, size=shape, dtype=np.uint8)
    scale = np.array([1e-3], np.float16).view(np.uint8)
    if kind.name == "Q4_K":
        blocks[..., 0:2] = blocks[..., 2:4] = scale  # of scales and of minima
    else:
        blocks[..., -2:] = scale
    return blocks.reshape(*values.shape[:-1], n_blocks * block_bytes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def logits(model):
    tokens = some_tokens(model.config, 2, 7)
    return model.prefill(tokens, model.new_cache(2), all_logits=True)


def refused(path, match, error=CheckpointError):
    with pytest.raises(error, match=match) as caught:
        Transformer.from_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


# ---- what is read


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("biases", [{}, {"qkv_bias": True}, {"o_bias": True, "mlp_bias": True}])
def test_a_float32_file_is_the_model_it_was_written_from(path, tie, biases):
    config = replace(CONFIG, tie_embeddings=tie, **biases)
    model = Transformer.from_checkpoint(write(path, config))
    assert model.config == config
    assert model.precision == FP32
    assert logits(model).tolist() == logits(Transformer(config, FP32, source_of(config))).tolist()


def source_of(config):
    """A source of the values that `write` writes, whatever the order it is asked in."""
    values = {(name, layer): values for name, layer, values in tensors_of(config, random_source(0))}
    return lambda name, layer, shape, expert=None: values[name, layer]


def test_neighbours_that_turn_together_are_half_a_head_apart():
    # Rows 0 to 3 of each head of 6 are two pairs (0, 1), (2, 3); rows 4 and 5 are not rotated.
    assert half_split(np.arange(12), 6, 0, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert half_split(np.arange(8)[:, None], 8, 0, 8)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_keys_that_may_be_left_out(path):
    config = replace(CONFIG, n_kv_heads=4, rope_theta=10000.0, max_context=None, eos_token_ids=())
    left_out = "attention.head_count_kv attention.key_length rope.freq_base rope.dimension_count context_length vocab_size"
    keys = {f"llama.{key}": None for key in left_out.split()} | {"tokenizer.ggml.eos_token_id": None}
    write(path, replace(config, max_context=1, eos_token_ids=(0,)), keys=keys)
    assert read_gguf(path).config == config


def test_every_token_that_ends_something_is_one_to_stop_at(path):
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert read_gguf(write(path, keys=keys)).config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "keys, scaling",
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"llama.rope.scale_linear": 2.0}, LinearScaling(2.0)),
    ],
)
def test_linear_scaling(path, keys, scaling):
    assert read_gguf(write(path, keys=keys)).config.rope_scaling == scaling


def test_factors_of_frequencies_are_those_of_llama3(path):
    """A converter writes Llama 3.1's scaling as one factor for each pair: original frequency / stretched one."""
    llama3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64)
    stretched = llama3.stretched(5000.0, 64, 1)
    factors = (5000.0 ** (-np.arange(0, 64, 2) / 64) / stretched).astype(np.float32)

    def add(tensors):
        tensors["rope_freqs.weight"] = "F32", factors

    scaling = read_gguf(write(path, change=add)).config.rope_scaling
    assert isinstance(scaling, FactorScaling)
    np.testing.assert_allclose(scaling.stretched(5000.0, 64, 1), stretched, rtol=1e-7)


def test_another_alignment(path):
    write(path, keys={"general.alignment": 64})
    assert read_gguf(path).config == CONFIG


# ---- types: values, and counts at their true bits


@pytest.mark.parametrize("kind", FORMATS_READ)
def test_values_of_a_type(path, kind):
    write(path, types=lambda name, layer: "F32" if name.endswith("norm") else kind)
    model = Transformer.from_checkpoint(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        actual = open_gguf(path).float32(tensor.name)
        assert actual.dtype == np.float32
        assert np.array_equal(actual, expected)
    assert model.precision.weights == FORMATS_READ[kind]
    assert np.isfinite(logits(model)).all()


@pytest.mark.parametrize("kind", FORMATS_READ)
def test_bits_of_a_type_are_those_of_the_file(kind):
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert FORMATS[FORMATS_READ[kind]].nbytes((3, 2 * per_block)) == 6 * block_bytes
    assert FORMATS[FORMATS_READ[kind]].bits == 8 * block_bytes / per_block


def some_types(name, layer):
    """Mostly Q4_0; the embedding, value projections and one down projection otherwise, vectors F32."""
    if name.endswith(("norm", ".bias")):
        return "F32"
    if name == "embed" or (name, layer) == ("down_proj", 1):
        return "Q8_0"
    return "F16" if name == "v_proj" else "Q4_0"


def test_every_tensor_is_counted_as_it_is_stored(path):
    config = replace(CONFIG, tie_embeddings=True)
    model = Transformer.from_checkpoint(write(path, config, some_types))
    assert model.precision.weights == "q4_0"
    assert set(model.precision.exceptions) == {
        ("embed", None, "q8_0"),
        ("v_proj", None, "fp16"),
        ("down_proj", 1, "q8_0"),
        ("final_norm", None, "fp32"),
        ("attn_norm", None, "fp32"),
        ("mlp_norm", None, "fp32"),
    }
    with npinfer.Ledger() as ledger:
        model.decode([3], model.new_cache())
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    embedding_row = sizes["token_embd.weight"] // config.vocab_size
    assert ledger.total().weight_bytes_read == sum(sizes.values()) + embedding_row  # the head is the whole embedding


def test_another_format_may_be_asked_for(path):
    write(path, types=some_types)
    asked = Precision("fp16", "bf16", "fp32")
    assert Transformer.from_checkpoint(path, precision=asked).precision == asked
    checkpoint = read_gguf(path)
    assert checkpoint.precision(weights="int8") == Precision("int8", "fp32", "fp32")
    assert checkpoint.precision(kv="fp16").kv == "fp16"
    assert checkpoint.precision(kv="fp16").exceptions == checkpoint.precision().exceptions
    assert checkpoint.precision(bits_per_weight=4.5).exceptions == ()


# ---- what is refused by name


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2', which is not supported; supported: 'llama'"),
        ({"llama.expert_count": 8}, r"the key 'llama\.expert_count' \(8\) is not one this package runs"),
        ({"llama.attention.sliding_window": 9}, r"the key 'llama\.attention\.sliding_window'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', which is not supported; supported: none, linear"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"the key 'llama\.rope\.scaling\.attn_factor'"),
        ({"llama.attention.value_length": 32}, "attention.value_length is 32, expected that of keys, 64"),
        ({"split.count": 3}, "is one of 3 parts of a model; merge them"),
        ({"llama.block_count": None}, r"the key 'llama\.block_count' is missing"),
        ({"llama.attention.head_count": [4, 4]}, r"n_heads is \[4, 4\], expected a whole number"),
        ({"llama.attention.head_count": 3}, "n_heads is 3, expected a multiple of n_kv_heads 2"),
        ({"llama.embedding_length": 0}, "d_model is 0, expected from 1"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps is nan, expected a positive number"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x', expected a whole number"),
    ],
)
def test_settings_that_are_not_run(path, keys, match):
    refused(write(path, keys=keys), match, ConfigError)


def test_keys_that_say_that_something_is_not_there(path):
    assert read_gguf(write(path, keys={"llama.expert_count": 0, "llama.expert_used_count": 0})).config == CONFIG


def test_a_type_that_is_not_read(path):
    def change(tensors):
        tensors["blk.1.ffn_up.weight"] = "Q5_0", tensors["blk.1.ffn_up.weight"][1]

    match = r"tensor 'blk\.1\.ffn_up\.weight' is of type Q5_0, which is not supported; supported: F32, F16"
    refused(write(path, change=change), match)


def test_a_missing_package_names_its_extra(path, monkeypatch):
    write(path)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match=r'needs the gguf package; pip install "npinfer\[gguf\]"'):
        Transformer.from_checkpoint(path)


# ---- files that are damaged, or lie


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda tensors: tensors.pop("blk.0.attn_q.weight"), r"1 tensors are missing, first 'blk\.0\.attn_q\.weight'"),
        (lambda tensors: tensors.pop("token_embd.weight"), "the tensor token_embd.weight is missing"),
        (lambda tensors: tensors.update(odd=tensors["output.weight"]), "1 tensors are not of a llama model, first 'odd'"),
        (
            lambda tensors: tensors.update({"blk.0.ffn_up.weight": ("F32", np.ones((3, 256), np.float32))}),
            r"blk\.0\.ffn_up\.weight is \(3, 256\), expected \(512, 256\) by the metadata",
        ),
        (
            lambda tensors: tensors.update({"output_norm.weight": ("F32", np.ones((1, 256), np.float32))}),
            r"output_norm\.weight is \(1, 256\), expected \(256,\)",
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_metadata(path, change, match):
    refused(write(path, change=change), match)


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"llama.vocab_size": 20}, "llama.vocab_size is 20, but the embedding has 19 rows"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokens of the tokenizer are 2, but the embedding has 19 rows"),
        ({"llama.block_count": 1000}, "1000 layers but only 21 tensors"),
        ({"llama.block_count": 1}, r"9 tensors are not of a llama model, first 'blk\.1\."),
        ({"general.alignment": 48}, "general.alignment is 48, expected a power of two"),
    ],
)
def test_numbers_that_contradict_each_other(path, keys, match):
    if "general.alignment" in keys:
        write(path, keys={"general.alignment": 64})
        path.write_bytes(path.read_bytes().replace(b"alignment\x04\0\0\0\x40", b"alignment\x04\0\0\0\x30"))
    else:
        write(path, keys=keys)
    refused(path, match)


def small(path, **options):
    """The bytes of a small file with a vocabulary."""
    keys = {"tokenizer.ggml.tokens": ["a", "b", "c", "de", ""], "tokenizer.ggml.scores": [0.5] * 5}
    return write(path, SMALL, keys=keys, **options).read_bytes()


@contextmanager
def at_once():
    start = perf_counter()
    yield
    assert perf_counter() - start < 5  # a lie that is believed takes minutes, or all memory


def u64(n):
    return n.to_bytes(8, "little")


def swap(old, new):
    """A lie: other bytes in one place."""

    def lie(data):
        assert data.count(old) == 1
        return data.replace(old, new)

    return lie


def items(key, kind, n):
    """Bytes of the beginning of an array of the metadata."""
    return key + b"\x09\0\0\0" + bytes([kind, 0, 0, 0]) + u64(n)


NORM = b"output_norm.weight\x01\0\0\0"  # a name, and that it has one dimension


@pytest.mark.parametrize(
    "lie, match",
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "begins with b'vers', expected b'GGUF'"),
        (lambda data: b"GGUF" + b"\x01\0\0\0" + data[8:], "version 1 of GGUF, expected 2 or 3"),
        (lambda data: b"GGUF" + b"\0\0\0\x03" + data[8:], "version 50331648 of GGUF, expected 2 or 3, little-endian"),
        (lambda data: data[:8] + u64(2**63) + data[16:], "9223372036854775808 tensors, expected at most"),
        (lambda data: data[:8] + u64(2**20) + data[16:], "dimensions, expected 1 to 4"),  # the values are no tensors
        (lambda data: data[:16] + u64(2**64 - 1) + data[24:], "18446744073709551615 metadata pairs, expected at most"),
        (lambda data: data[:24] + u64(2**62) + data[32:], "expected 4611686018427387904 more at byte 32 for the header"),
        (swap(items(b"tokens", 8, 5), items(b"tokens", 8, 2**40)), "1099511627776 items of an array, expected at most"),
        (swap(items(b"tokens", 8, 5), items(b"tokens", 8, 2**21)), "more at byte .* for the header"),
        (swap(items(b"scores", 6, 5), items(b"scores", 6, 2**21)), "8388608 more at byte .* for the header"),
        (swap(items(b"scores", 6, 5), items(b"scores", 9, 5)), "a value has type 9, expected 0 to 12, and no array"),
        (swap(b"block_count", b"block_coun\xff"), "a text is not UTF-8"),
        (swap(b"ggml.tokens", b"ggml.scores"), "the metadata key 'tokenizer.ggml.scores' appears twice"),
        (swap(b"attn_q.weight", b"attn_k.weight"), r"tensor 'blk\.0\.attn_k\.weight' appears twice"),
        (swap(NORM + u64(8), NORM + u64(2**50)), "is at offset"),  # what comes behind it
        (swap(NORM + u64(8), NORM + u64(2**62)), "shape .4611686018427387904,., expected rows"),
        (swap(NORM + u64(8), NORM + u64(0)), r"shape \(0,\), expected rows"),
        (swap(NORM, NORM[:-4] + b"\x09\0\0\0"), "9 dimensions, expected 1 to 4"),
        (lambda data: data + bytes(32), r"bytes, expected \d+ by its header"),
    ],
)
def test_a_lie_is_refused_at_once(path, lie, match):
    path.write_bytes(lie(small(path)))
    with at_once():
        refused(path, match)


@pytest.mark.parametrize("offset", [32, 2**40, 2**63])
def test_offsets_that_overlap_or_leave_the_file(path, offset):
    data = small(path)
    second = data.index(u64(160), data.index(b"output_norm.weight"))  # behind 5 * 8 * 4 bytes of embedding
    path.write_bytes(data[:second] + u64(offset) + data[second + 8 :])
    refused(path, rf"tensor 'output_norm\.weight' is at offset {offset}, expected 160, behind the one before")


def test_a_file_cut_anywhere_is_refused(path):
    data = small(path)
    n_header = data.index(b"output_norm.weight")
    for n_kept in [*range(n_header), *range(n_header, len(data), 5)]:
        path.write_bytes(data[:n_kept])
        refused(path, "is empty|begins with|for the header|by its header")


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_are_flipped_give_one_error_or_a_model(path, data):
    """Flips in the header first of all: what is believed then must be in the file, and the model can run."""
    good = bytearray(small(path))
    n_header = open_gguf(path)._stored["token_embd.weight"].begin
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, n_header - 1) | st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    path.write_bytes(good)
    with at_once():
        try:
            model = Transformer.from_checkpoint(path)
        except InputError as error:
            assert str(error).startswith(str(path))
            assert "\n" not in str(error)
        else:
            tokens = some_tokens(model.config, 1, 3)
            with np.errstate(all="ignore"):
                assert model.prefill(tokens, model.new_cache()).shape == (1, model.config.vocab_size)
