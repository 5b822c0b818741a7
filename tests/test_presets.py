"""Shapes of published models against their published totals, and what a config or a precision refuses."""

import math
import pickle
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

import costmodel
from costmodel.formulas import n_parameters, n_streamed_parameters
from npinfer import ConfigError, ModelConfig, Precision, RopeScaling, UnknownName, preset, presets
from npinfer.known import PRESETS
from npinfer.tables import read_table, table_names
from npinfer.parts import Experts, Latent
from npinfer.scaling import LinearScaling, YarnScaling
from npinfer.tensors import layer_tensors, model_tensors
from strategies import T1, configs

# Parameters that follow from the published shapes; sources in presets.toml.
PUBLISHED = {
    "Mistral-7B": 7_241_732_096,
    "LLaMA-7B": 6_738_415_616,
    "LLaMA-13B": 13_015_864_320,
    "LLaMA-30B": 32_528_943_616,
    "LLaMA-65B": 65_285_660_672,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "CodeLlama-34B": 33_743_970_304,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama-1.1B": 1_100_048_384,
    "OpenLLaMA-3B": 3_426_473_600,
    "Yi-34B": 34_388_917_248,
    "Mistral-Small-3.1-24B (text)": 23_572_403_200,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-4B (text)": 3_880_263_168,
    "Gemma-3-12B (text)": 11_766_034_176,
    "Gemma-3-27B (text)": 27_009_346_304,
    "Phi-3-mini-4k": 3_821_079_552,
    "Phi-4": 14_659_507_200,
    "GPT-2 (124M)": 124_439_808,
    "GPT-2 XL": 1_557_611_200,
    "DeepSeek-V3": 671_026_419_200,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-2-13B": 13_716_198_400,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def preset_name(published):
    """What the preset of a published model is called: its name in lower case, with hyphens, without a remark in brackets."""
    return published.partition(" (")[0].lower().replace(" ", "-")


N_PARAMETERS = {preset_name(name): n_parameters for name, n_parameters in PUBLISHED.items()}
DATA_FILES = [Path(PRESETS), Path(costmodel.__file__).with_name("gpus.toml")]
SIZES = ("n_layers", "d_model", "n_heads", "d_ff", "vocab_size", "n_kv_heads", "head_dim", "sliding_window", "max_context")


def changed(**fields):
    return replace(T1, **fields)


# ---- presets


@pytest.mark.parametrize("name", presets())
def test_parameters_equal_the_published_total(name):
    config = preset(name)
    assert config.name == name
    # DeepSeek-V3's total counts the corrections of its gate: 58 layers of 256, stored and no parameters.
    total = N_PARAMETERS[name] - (58 * 256 if name == "deepseek-v3" else 0)
    assert n_parameters(config) == total
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    looked_up += config.max_context * config.d_model if config.learned_positions else 0
    assert n_streamed_parameters(config) == total - looked_up


def test_every_published_total_has_its_preset():
    assert set(N_PARAMETERS) == set(presets())


def n_elements(config):
    """Elements of all tensors of a model, layer by layer."""
    layers = [layer_tensors(config, kind) for kind in config.kinds]
    return sum(math.prod(shape) for shapes in [model_tensors(config), *layers] for shape in shapes.values())


@pytest.mark.parametrize("name", presets())
def test_elements_of_the_tensors_equal_the_published_total(name):
    assert n_elements(preset(name)) == N_PARAMETERS[name]


@given(configs())
def test_parameters_are_the_elements_of_the_tensors(config):
    assert n_parameters(config) == n_elements(config)


def test_settings_that_counts_do_not_show():
    llama = preset("llama-3.1-8b")
    assert llama.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert (llama.rope_theta, llama.norm_eps, llama.max_context) == (500000.0, 1e-5, 131072)
    assert preset("mistral-7b").sliding_window is None
    assert preset("mistral-7b-v0.1").windows == (4096,) * 32
    assert list(preset("mistral-7b-v0.1").runs()) == [(range(32), (4096, False))]
    assert preset("llama-3.2-1b").tie_embeddings


def test_settings_of_the_other_families():
    yarn = YarnScaling(32.0, 4096, truncate=False)
    gpt_oss = preset("gpt-oss-20b")
    assert (gpt_oss.rope_scaling, gpt_oss.windows[:3], gpt_oss.attn_sinks) == (yarn, (128, None, 128), True)
    assert gpt_oss.experts == Experts(32, 4, 2880, gate="topk_softmax", router_bias=True)
    deepseek = preset("deepseek-v3")
    assert deepseek.latent == Latent(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)
    assert [kind.sparse for kind in deepseek.kinds] == [False] * 3 + [True] * 58
    assert deepseek.kv_shape == (1, 1, 576)
    # 0.1 ln(40) + 1 = 1.36888..., squared, over the root of 128 + 64
    assert deepseek.attn_scale == pytest.approx(1.3688879454113936**2 / math.sqrt(192))
    gemma = preset("gemma-3-27b")
    assert gemma.windows == ((1024,) * 5 + (None,)) * 10 + (1024,) * 2
    assert (gemma.rope_scaling, gemma.local_rope_theta) == (LinearScaling(8.0), 10000.0)
    assert gemma.attn_scale == pytest.approx(1 / math.sqrt(168))
    assert preset("gemma-2-27b").attn_scale == pytest.approx(1 / 12)
    assert preset("gemma-2-9b").windows[:4] == (4096, None, 4096, None)
    assert preset("olmo-2-7b").qk_norm == "full" and not preset("olmo-2-7b").pre_norm
    assert preset("gpt-2").learned_positions and preset("gpt-2").rope_dim == 0


# Published totals that count something twice, or something else, and by how many elements; the notes say it too.
DIFFERENT = {
    "llama-2-7b": (6_738_417_664, 2048),
    "llama-2-13b": (13_015_866_880, 2560),
    "llama-2-70b": (68_976_653_312, 5120),
    "qwen3-0.6b": (751_632_384, 151_936 * 1024),
    "qwen3-1.7b": (2_031_739_904, 151_936 * 2048),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_published_total_that_differs_is_explained(name):
    total, difference = DIFFERENT[name]
    assert N_PARAMETERS[name] + difference == total
    note = read_table(PRESETS, name, "model")["note"]
    assert str(total) in note and str(difference) in note


@pytest.mark.parametrize("error", [KeyError, ValueError, UnknownName])
def test_an_unknown_preset_lists_the_known_ones(error):
    with pytest.raises(error) as caught:
        preset("llama-2-7B")
    assert str(caught.value) == f"no model 'llama-2-7B'; known: {', '.join(N_PARAMETERS)}"
    assert caught.value.known == presets()


@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: path.name)
def test_a_table_cut_out_of_its_file_equals_a_full_parse(path):
    parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    assert table_names(path) == list(parsed)
    for name, table in parsed.items():
        assert read_table(path, name, "thing") == table
        assert table["source"]


# ---- resized


def test_resized_keeps_the_ratio_of_d_ff_and_divides_the_heads():
    mistral = preset("mistral-7b")
    half = mistral.resized(d_model=2048)
    assert (half.d_ff, half.head_dim, half.n_heads) == (7168, 64, 32)
    assert mistral.resized(d_model=2048, d_ff=5000).d_ff == 5000
    assert mistral.resized(d_model=2048, head_dim=128).head_dim == 128
    assert mistral.resized(n_heads=16).head_dim == 256
    assert mistral.resized(n_heads=16, d_model=2048).head_dim == 128
    assert mistral.resized(n_heads=16).d_ff == mistral.d_ff
    others = dict(n_layers=2, n_kv_heads=4, d_ff=100, vocab_size=50)
    assert mistral.resized(**others) == replace(mistral, **others)
    assert mistral.resized(d_ff=100).head_dim == 128
    # A model whose head_dim is not d_model / n_heads keeps it until one of the two is given.
    assert T1.resized(d_ff=30).head_dim == 4
    assert changed(head_dim=6).resized(n_layers=1).head_dim == 6
    assert changed(head_dim=6).resized(n_heads=2).head_dim == 8


def test_resized_says_in_the_name_what_is_not_the_models_own():
    mistral = preset("mistral-7b")
    assert mistral.resized(n_layers=32).name == "mistral-7b"
    assert mistral.resized(n_layers=2, n_kv_heads=8, vocab_size=99).name == "mistral-7b n_layers=2 vocab_size=99"
    assert mistral.resized() == mistral


@pytest.mark.parametrize("sizes, match", [
    (dict(d_model=4097), r"d_ff keeps its ratio 14336/4096 to d_model, which is not whole at d_model 4097; give d_ff \(--d-ff\)"),
    (dict(d_model=4096 + 2048, n_heads=40, n_kv_heads=8), r"d_model 6144 is not a multiple of n_heads 40; give head_dim \(--head-dim\)"),
    (dict(n_heads=24), r"d_model 4096 is not a multiple of n_heads 24; give head_dim"),
    (dict(n_heads=4096), "head_dim is 1, expected an even number"),
    (dict(n_kv_heads=5), r"n_heads is 32, expected a multiple of n_kv_heads 5.*\(--kv-heads\)"),
    (dict(n_layers=0), "n_layers is 0, expected from 1 to"),
    (dict(d_model=-4096), "d_model is -4096"),
    (dict(d_model=2.5), r"d_model is 2\.5, expected a whole number"),
    (dict(vocab_size=2**31 + 1), r"vocab_size is 2147483649, expected from 1 to 2\*\*31"),
])
def test_resized_refuses(sizes, match):
    with pytest.raises(ConfigError, match=match):
        preset("mistral-7b").resized(**sizes)


# ---- what a config refuses


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value, expected", [
    (-1, r"from 1 to 2\*\*"), (0, r"from 1 to 2\*\*"), (2**31 + 1, r"from 1 to 2\*\*"),
    (True, "a whole number"), (4.0, "a whole number"), ("4", "a whole number"), (float("nan"), "a whole number"),
])
def test_a_size_is_a_whole_number_within_bounds(name, value, expected):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, expected {expected}"):
        changed(**{name: value})


@pytest.mark.parametrize("fields, match", [
    (dict(n_kv_heads=3), "n_heads is 4, expected a multiple of n_kv_heads 3"),
    (dict(n_kv_heads=8), "n_heads is 4, expected a multiple of n_kv_heads 8"),
    (dict(head_dim=5), "head_dim is 5, expected an even number"),
    (dict(head_dim=None, d_model=18), "d_model 18 is not a multiple of n_heads 4; give head_dim"),
    (dict(head_dim=None, d_model=12), "head_dim is 3, expected an even number"),
    (dict(tie_embeddings=1), "tie_embeddings is 1, expected true or false"),
    (dict(qkv_bias="yes"), "qkv_bias is 'yes', expected true or false"),
    (dict(o_bias=None), "o_bias is None"),
    (dict(mlp_bias=0), "mlp_bias is 0"),
    (dict(rope_theta=0), "rope_theta is 0, expected a positive number"),
    (dict(rope_theta=float("inf")), "rope_theta is inf"),
    (dict(norm_eps=-1e-5), "norm_eps is -1e-05"),
    (dict(norm_eps=True), "norm_eps is True"),
    (dict(norm_eps="1e-5"), "norm_eps is '1e-5'"),
])
def test_a_config_that_contradicts_itself_is_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        changed(**fields)


@pytest.mark.parametrize("numbers, match", [
    ((0, 1, 4, 8192), "rope_scaling factor is 0"),
    ((8, 1, 4, -1), "rope_scaling original_max_context is -1"),
    ((8, 4, 4, 8192), "low_freq_factor is 4, expected below high_freq_factor 4"),
    ((8, "1", 4, 8192), "rope_scaling low_freq_factor is '1'"),
])
def test_a_rope_scaling_that_makes_no_sense_is_refused(numbers, match):
    with pytest.raises(ConfigError, match=match):
        RopeScaling(*numbers)


def test_defaults_follow_from_what_is_given():
    config = ModelConfig(n_layers=2, d_model=64, n_heads=4, d_ff=128, vocab_size=256)
    assert (config.n_kv_heads, config.head_dim, config.sliding_window) == (4, 16, None)
    assert config == replace(config, name="another")  # a name is no part of the shape
    assert hash(config) == hash(replace(config, name="another"))
    assert type(changed(n_layers=np.int64(2)).n_layers) is int
    assert changed(n_layers=2**16).n_layers == 2**16
    assert ModelConfig(1, 2**31, 2**30, 1, 2**31, head_dim=2).d_model == 2**31


def test_a_config_serves_as_a_key_whatever_its_tokens_came_in():
    """A list of ids, as config.json has it, must not break the memo of the closed forms."""
    config = changed(eos_token_ids=[1, 2])
    assert config == changed(eos_token_ids=(1, 2))
    assert hash(config) == hash(changed(eos_token_ids=(1, 2)))


# ---- precisions


@pytest.mark.parametrize("field, name, known", [
    ("weights", "fp64", "fp32, fp16, bf16, fp8, int8, int4, q8_0, q4_0, q4_1, q4_k, q6_k, mxfp4"),
    ("weights", "FP16", "fp32, fp16, bf16, fp8, int8, int4, q8_0, q4_0, q4_1, q4_k, q6_k, mxfp4"),
    ("weights", None, "fp32, fp16, bf16, fp8, int8, int4, q8_0, q4_0, q4_1, q4_k, q6_k, mxfp4"),
    ("kv", "int4", "fp32, fp16, bf16, fp8, int8"),
    ("activations", "int8", "fp32, fp16, bf16, fp8"),
    ("activations", "int4", "fp32, fp16, bf16, fp8"),
])
def test_an_unknown_format_is_refused_by_name(field, name, known):
    for error in (UnknownName, KeyError, ValueError):
        with pytest.raises(error) as caught:
            Precision(**{field: name})
        assert str(caught.value) == f"no {field} format {name!r}; known: {known}"


@pytest.mark.parametrize("bits", [0, -4, 64.1, float("nan"), float("inf"), "four", [4]])
def test_bits_per_weight_is_a_number_of_bits(bits):
    with pytest.raises(ConfigError, match="bits_per_weight is .*, expected"):
        Precision(bits_per_weight=bits)


@pytest.mark.parametrize("weights, vectors", [
    ("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp8", "fp16"), ("int8", "fp16"), ("int4", "fp16"),
])
def test_gains_and_biases_stay_at_16_bits_or_more(weights, vectors):
    assert Precision(weights=weights).vectors == vectors
    assert Precision(weights=weights).matrices == weights


@pytest.mark.parametrize("weights, shape, nbytes", [
    ("fp32", (3, 5), 60), ("bf16", (3, 5), 30), ("fp8", (3, 5), 15),
    ("int8", (3, 5), 15 + 3 * 2),
    ("int4", (3, 5), 8 + 3 * 2),  # 60 bits, and one group of 128 for each output
    ("int4", (2, 257), 257 + 2 * 3 * 2),  # two whole groups and a short one
    ("int4", (2, 256), 256 + 2 * 2 * 2),
])
def test_stored_bytes_of_a_matrix(weights, shape, nbytes):
    assert Precision(weights=weights).matrices.nbytes(shape) == nbytes
    assert costmodel.storage.matrix_bytes(Precision(weights=weights).matrices, *shape) == nbytes


@pytest.mark.parametrize("bits, n, nbytes", [(4.83, 100, 61), (8, 3, 3), (0.5, 3, 1), (2.3, 1000, 288), (4.1, 80, 41)])
def test_stored_bytes_of_mixed_formats_are_rounded_up_exactly(bits, n, nbytes):
    # 4.83 * 100 / 8 = 60.375; 2.3 * 1000 / 8 = 287.5; 4.1 * 80 / 8 = 41, which floats would make more of
    assert Precision(bits_per_weight=bits).matrices.nbytes((1, n)) == nbytes
    assert costmodel.storage.matrix_bytes(Precision(bits_per_weight=bits).matrices, 1, n) == nbytes


def test_errors_and_records_survive_pickling():
    error = pickle.loads(pickle.dumps(UnknownName("model", "x", ["a", "b"])))
    assert str(error) == "no model 'x'; known: a, b" and error.known == ["a", "b"]
    precision = Precision("int8", bits_per_weight=4.5)
    assert pickle.loads(pickle.dumps(precision)) == precision


@pytest.mark.parametrize("fields, match", [
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"eos_token_ids": 2}, "eos_token_ids is 2, expected a tuple"),
    ({"rope_scaling": {"factor": 8.0}}, "expected a RopeScaling"),
])
def test_values_of_another_kind_are_refused_by_name(fields, match):
    with pytest.raises(ConfigError, match=match):
        changed(**fields)


def test_numpy_numbers_serve_as_settings():
    assert changed(rope_theta=np.int64(10000), norm_eps=np.float64(1e-5)) == T1
    assert type(changed(norm_eps=np.float64(1e-5)).norm_eps) is float


def test_a_config_that_went_through_a_file_is_the_same_key():
    """Hashes of texts differ from process to process; one that was kept must not travel."""
    config = preset("gemma-3-1b")
    memo = {config: "found"}
    again = pickle.loads(pickle.dumps(config))
    assert "_hash" in config.__dict__ and "_hash" not in again.__dict__
    assert memo[again] == "found" and memo.get(replace(config, d_ff=1)) is None
    assert hash(replace(config, name="another")) == hash(config)
