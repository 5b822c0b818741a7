"""Published config.json files: translated whole, or refused by the name of what is not run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import npinfer
from npinfer import ConfigError, ModelConfig, RopeScaling

GOLDEN = Path(__file__).parent / "golden"

# A small model in the published words, nothing left out that a run needs.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 50, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
OURS = ModelConfig(
    n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=40, vocab_size=50, norm_eps=1e-5, max_context=64
)


def translated(published=LLAMA, **keys):
    return ModelConfig.from_hf(published | keys)


def without(published, *keys):
    return {key: value for key, value in published.items() if key not in keys}


def refused(match, published=LLAMA, **keys):
    with pytest.raises(ConfigError, match=match) as caught:
        translated(published, **keys)
    message = str(caught.value)
    assert message.startswith("config: ")
    assert "\n" not in message
    return message


# ---- where it comes from


def test_dict_path_and_folder_give_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for source in (LLAMA, path, str(path), tmp_path, str(tmp_path)):
        assert ModelConfig.from_hf(source) == OURS


def test_the_dict_is_left_as_it_was():
    published = json.loads((GOLDEN / "llama3-scaled-rope" / "config.json").read_text())
    before = json.dumps(published)
    ModelConfig.from_hf(published)
    assert json.dumps(published) == before


def test_it_is_called_what_the_file_or_its_folder_is_called(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_hf(folder).name == "my-model"
    (folder / "phi-4.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_hf(folder / "phi-4.json").name == "phi-4"
    assert translated(_name_or_path="meta-llama/Llama-2-7b-hf").name == "llama"
    (folder / "config.json").write_text(json.dumps(LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-hf"}))
    assert ModelConfig.from_hf(folder).name == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "is not JSON"),
        (b'{"model_type": "llama"', "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds list, expected a JSON object"),
        (b"null", "holds NoneType, expected a JSON object"),
        (b"{}", "model_type is None, which is not supported"),
        (b'{"model_type": "llama", "model_type": "mistral"}', "is not JSON .the key 'model_type' appears twice"),
        (b'{"model_type": "llama", "rope_scaling": {"factor": 2, "factor": 4}}', "the key 'factor' appears twice"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, match):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=match) as caught:
        ModelConfig.from_hf(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["config.json", "nowhere/config.json"])
def test_a_file_that_is_not_there(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read.*expected a config.json or the folder that holds one"):
        ModelConfig.from_hf(tmp_path / name)


# ---- RoPE, in the older keys and the newer


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000])
def test_older_and_newer_keys_of_rope_say_the_same(theta):
    older = translated(rope_theta=theta, rope_scaling=None)
    newer = translated(without(LLAMA, "rope_theta"), rope_parameters={"rope_theta": theta, "rope_type": "default"})
    assert older == newer == replace(OURS, rope_theta=theta)


def test_older_and_newer_keys_of_llama3_scaling_say_the_same():
    expected = replace(OURS, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    older = translated(rope_theta=5e5, rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    oldest = translated(rope_theta=5e5, rope_scaling=LLAMA3 | {"type": "llama3"})
    both = translated(rope_theta=5e5, rope_scaling=LLAMA3 | {"type": "llama3", "rope_type": "llama3"})
    newer = translated(
        without(LLAMA, "rope_theta"), rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}
    )
    assert older == oldest == both == newer == expected


def test_rope_theta_is_10000_where_the_file_leaves_it_out():
    assert translated(without(LLAMA, "rope_theta")).rope_theta == 10000


def test_two_rope_thetas_are_refused():
    refused("rope_theta is 10000.0 and in rope_parameters 500000.0; which one", rope_parameters={"rope_theta": 5e5})


@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "mrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_kinds_of_rope_are_refused_by_name(kind, key):
    message = refused(f"rope type is '{kind}', which is not supported", rope_scaling={key: kind, "factor": 2.0})
    assert "supported: default, llama3, linear, dynamic, yarn" in message
    refused(f"'{kind}'", without(LLAMA, "rope_theta"), rope_parameters={"rope_theta": 1e4, key: kind, "factor": 2.0})


@pytest.mark.parametrize("key", LLAMA3)
def test_llama3_scaling_needs_all_of_its_numbers(key):
    refused(f"rope type llama3 takes exactly .*{key}", rope_scaling=without(LLAMA3, key) | {"rope_type": "llama3"})


def test_llama3_scaling_takes_no_others():
    refused("unknown: attention_factor", rope_scaling=LLAMA3 | {"rope_type": "llama3", "attention_factor": 1.5})


@pytest.mark.parametrize(
    "scaling, match",
    [
        ({"low_freq_factor": 4.0}, "low_freq_factor is 4, expected below high_freq_factor 4"),
        ({"factor": 0}, "factor is 0, expected a positive number"),
        ({"factor": "8"}, "factor is '8', expected a positive number"),
        ({"original_max_position_embeddings": None}, "original_max_context is None, expected a whole number"),
    ],
)
def test_llama3_numbers_that_cannot_be(scaling, match):
    refused(match, rope_scaling=LLAMA3 | {"rope_type": "llama3"} | scaling)


def test_rope_settings_without_a_kind_are_refused():
    refused("rope type is 'default' but has factor", rope_scaling={"factor": 4.0})
    refused("partial_rotary_factor", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("value", ["linear", 2.0, ["linear", 2.0]])
def test_a_rope_scaling_that_is_no_object(value):
    refused("rope_scaling is .*expected an object or null", rope_scaling=value)


# ---- what families leave out or have of their own


def test_a_mistral_without_the_key_has_the_published_window():
    assert translated(MISTRAL) == replace(OURS, sliding_window=4096)


def test_null_is_no_window():
    assert translated(MISTRAL, sliding_window=None) == OURS


def test_a_window_that_is_given():
    assert translated(MISTRAL, sliding_window=8).sliding_window == 8


def test_a_llama_has_no_window():
    assert translated().sliding_window is None
    refused("'sliding_window'", sliding_window=4096)


def test_kv_heads_where_the_file_leaves_them_out():
    sizes = {"num_attention_heads": 16, "hidden_size": 64}
    assert translated(without(LLAMA, "num_key_value_heads"), **sizes).n_kv_heads == 16
    assert translated(without(MISTRAL, "num_key_value_heads"), **sizes).n_kv_heads == 8  # the published default
    assert translated(MISTRAL, num_key_value_heads=None, **sizes).n_kv_heads == 16


def test_norm_eps_is_1e_6_where_the_file_leaves_it_out():
    assert translated(without(LLAMA, "rms_norm_eps")).norm_eps == 1e-6
    assert translated(without(MISTRAL, "rms_norm_eps")).norm_eps == 1e-6


def test_head_dim_is_the_declared_one():
    assert translated(head_dim=8).head_dim == 8
    assert translated(head_dim=None).head_dim == 6


def test_biases_and_a_tied_head():
    config = translated(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert config == replace(OURS, qkv_bias=True, o_bias=True, mlp_bias=True, tie_embeddings=True)
    assert translated(attention_bias=None) == OURS
    refused("qkv_bias is 'no', expected true or false", attention_bias="no")


def test_biases_of_a_mistral_are_refused():
    refused("the key 'attention_bias'", MISTRAL, attention_bias=True)


@pytest.mark.parametrize("value, ids", [(None, ()), (2, (2,)), (0, (0,)), ([128001, 128009], (128001, 128009)), ([], ())])
def test_ids_that_end_a_text(value, ids):
    assert translated(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize("value", ["</s>", -1, 2.0, [1, None], True, {}])
def test_ids_that_are_none(value):
    refused("eos_token_id is .*expected a token id or a list of them", eos_token_id=value)


# ---- what is refused by name


@pytest.mark.parametrize("model_type", ["gpt_neox", "gemma", "gemma3", "deepseek_v2", "phi", "mllama", "Llama", "", None, 7])
def test_an_unsupported_family_is_refused_with_those_that_are(model_type):
    refused(f"model_type is {model_type!r}, which is not supported; supported: llama, mistral", model_type=model_type)


def test_a_family_that_is_no_name_is_refused():
    refused("model_type is .*supported: llama, mistral", model_type=["llama"])


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "LlamaForSequenceClassification", "LlamaModel"])
def test_another_head_is_refused(architecture):
    refused(f"architectures is .*{architecture}.*expected .*LlamaForCausalLM", architectures=[architecture])


def test_architectures_may_be_left_out():
    assert translated(without(LLAMA, "architectures")) == translated(architectures=None) == OURS


@pytest.mark.parametrize(
    "key, value",
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("num_local_experts", 8),
        ("query_pre_attn_scalar", 256),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_interleaved", True),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8),
        ("clip_qkv", 8.0),
        ("use_qk_norm", True),
        ("attention_bias_", True),
        ("something_new", "on"),
    ],
)
def test_a_key_that_may_change_the_result_is_refused_by_name(key, value):
    message = refused(f"the key '{key}' ", **{key: value})
    assert "may change the result" in message


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
@pytest.mark.parametrize("key", ["quantization_config", "rope_interleaved", "something_new", "clip_qkv", "use_qk_norm"])
def test_a_key_that_says_something_is_not_there_passes(key, value):
    assert translated(**{key: value}) == OURS


@pytest.mark.parametrize(
    "key, value",
    [
        # Bookkeeping, training and generation, as files of these two families carry them.
        ("_name_or_path", "meta-llama/Meta-Llama-3-8B"),
        ("_attn_implementation", "flash_attention_2"),
        ("_attn_implementation_autoset", True),  # what transformers 4.46 to 4.51 write
        ("attention_dropout", 0.1),
        ("bos_token_id", 1),
        ("pad_token_id", -1),
        ("torch_dtype", "bfloat16"),
        ("dtype", "float16"),
        ("initializer_range", 0.02),
        ("is_llama_config", True),
        ("pretraining_tp", 2),
        ("max_sequence_length", 2048),
        ("transformers_version", "4.43.0"),
        ("transformers.js_config", {"kv_cache_dtype": {"q4f16": "float16"}}),
        ("unsloth_version", "2024.9"),
        ("use_cache", True),
        ("temperature", 0.6),
        ("id2label", {"0": "LABEL_0"}),
    ],
)
def test_a_key_that_changes_no_logit_passes(key, value):
    assert translated(**{key: value}) == OURS


def test_a_number_of_hundreds_of_digits_is_cut_short():
    with pytest.raises(ConfigError, match=r"vocab_size is 10+, expected from 1 to 2\*\*31") as caught:
        translated(vocab_size=10**400)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu", "GELU", None, ["silu"]])
def test_other_activations_are_refused_by_name(act):
    with pytest.raises(ConfigError) as caught:
        translated(hidden_act=act)
    assert f"hidden_act is {act!r}, supported: silu, swish" in str(caught.value)


def test_silu_by_its_other_name():
    assert translated(hidden_act="swish") == translated(without(LLAMA, "hidden_act")) == OURS


# ---- numbers that cannot be


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_size_that_is_missing(key):
    refused(f"{key} is missing", without(LLAMA, key))
    refused(f"{key} is missing", LLAMA, **{key: None})


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"num_key_value_heads": 3}, "n_heads is 4, expected a multiple of n_kv_heads 3"),
        ({"num_key_value_heads": 8}, "n_heads is 4, expected a multiple of n_kv_heads 8"),
        ({"num_key_value_heads": 0}, "n_kv_heads is 0, expected from 1"),
        ({"hidden_size": 26}, "d_model 26 is not a multiple of n_heads 4; give head_dim"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"head_dim": 0}, "head_dim is 0, expected from 1"),
        ({"num_hidden_layers": 0}, "n_layers is 0, expected from 1"),
        ({"num_hidden_layers": -2}, "n_layers is -2, expected from 1"),
        ({"num_hidden_layers": "2"}, "n_layers is '2', expected a whole number"),
        ({"num_hidden_layers": True}, "n_layers is True, expected a whole number"),
        ({"hidden_size": 24.0}, "d_model is 24.0, expected a whole number"),
        ({"vocab_size": 2**40}, r"vocab_size is 1099511627776, expected from 1 to 2\*\*31"),
        ({"rms_norm_eps": 0}, "norm_eps is 0, expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "norm_eps is nan, expected a positive number"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0, expected a positive number"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a positive number"),
        ({"tie_word_embeddings": "true"}, "tie_embeddings is 'true', expected true or false"),
        ({"max_position_embeddings": 0}, "max_context is 0, expected from 1"),
    ],
)
def test_numbers_that_contradict_each_other_or_themselves(keys, match):
    refused(match, **keys)


def test_a_window_of_nothing():
    refused("sliding_window is 0, expected from 1", MISTRAL, sliding_window=0)


# ---- published files, whole


PUBLISHED = {
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "tinyllama-1.1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
        "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.35.0", "use_cache": True, "vocab_size": 32000,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True,
        "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
        "use_cache": True, "vocab_size": 32768,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True, "vocab_size": 49152,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_preset_of_its_name(name):
    config = ModelConfig.from_hf(PUBLISHED[name])
    assert replace(config, eos_token_ids=()) == npinfer.preset(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_as_newer_versions_would_write_it(name):
    older = PUBLISHED[name]
    rope = {"rope_theta": older.get("rope_theta", 10000.0), "rope_type": "default", **(older.get("rope_scaling") or {})}
    newer = without(older, "rope_theta", "rope_scaling", "torch_dtype")
    newer |= {"rope_parameters": rope, "dtype": older["torch_dtype"]}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(older)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied", "llama-mqa-bias", "llama3-scaled-rope", "mistral-window"])
def test_a_golden_case_in_the_other_keys_of_rope(name):
    published = json.loads((GOLDEN / name / "config.json").read_text())
    if "rope_parameters" in published:
        rope = published.pop("rope_parameters")
        published |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    else:
        rope = {"rope_theta": published.pop("rope_theta"), **(published.pop("rope_scaling") or {})}
        published["rope_parameters"] = rope
    assert ModelConfig.from_hf(published) == ModelConfig.from_hf(GOLDEN / name)
