"""What each family's config.json says in its own words, and which of its settings are refused by name.

Mechanisms that all families share are in test_hf.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import npinfer
from npinfer import ConfigError, ModelConfig
from npinfer.families import FAMILIES
from npinfer.parts import Experts, Latent
from npinfer.scaling import DynamicScaling, LinearScaling, RopeScaling, YarnScaling

GOLDEN = Path(__file__).parent / "golden"


def config_json(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def changed(name, *removed, **keys):
    """The config of a golden case with other keys, and without those removed."""
    return ModelConfig.from_hf({key: value for key, value in (config_json(name) | keys).items() if key not in removed})


def refused(match, name, *removed, **keys):
    with pytest.raises(ConfigError, match=match) as caught:
        changed(name, *removed, **keys)
    message = str(caught.value)
    assert message.startswith("config: ")
    assert "\n" not in message


# ---- the golden cases, by hand


def small(n_kv_heads, head_dim=8, norm_eps=1e-6, **fields):
    """What all golden cases have in common."""
    fields = {"max_context": 512, "d_ff": 80, "n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 101} | fields
    return ModelConfig(n_kv_heads=n_kv_heads, head_dim=head_dim, norm_eps=norm_eps, **fields)


GEMMA = dict(head_dim=16, tie_embeddings=True, post_norm=True, mlp_act="geglu", scale_embeddings=True, eos_token_ids=(1,))
BY_HAND = {
    "llama-gqa": small(2, eos_token_ids=(2,)),
    "llama-bf16-sharded": small(2, eos_token_ids=(2,)),
    "llama-mha-tied": small(4, tie_embeddings=True, rope_theta=5e5, eos_token_ids=(2,)),
    "llama-mqa-bias": small(1, qkv_bias=True, o_bias=True, mlp_bias=True, eos_token_ids=(2,)),
    "llama3-scaled-rope": small(
        2, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), max_context=256, eos_token_ids=(2,)
    ),
    "mistral-window": small(2, head_dim=16, sliding_window=8, eos_token_ids=(2,)),
    "mixtral-moe": small(2, norm_eps=1e-5, rope_theta=1e6, experts=Experts(4, 2, 80), eos_token_ids=(2,)),
    "qwen2-bias": small(2, qkv_bias=True, rope_theta=1e6),
    "qwen3-qknorm": small(2, head_dim=16, qk_norm="head", rope_theta=1e6),
    "qwen3-moe": small(2, head_dim=16, qk_norm="head", rope_theta=1e6, experts=Experts(5, 2, 24, dense_layers=(0,))),
    "gemma2": small(2, sliding_window=8, window_pattern=(True, False), attn_softcap=50.0, final_softcap=30.0, **GEMMA),
    "gemma3": small(
        2, n_layers=4, sliding_window=6, window_pattern=(True, True, False), qk_norm="head", rope_theta=1e6,
        rope_scaling=LinearScaling(8.0), local_rope_theta=1e4, **GEMMA,
    ),
    "phi3-fused": small(4, norm_eps=1e-5, eos_token_ids=(32000,)),
    "gpt2": small(
        4, norm_eps=1e-5, d_ff=128, max_context=128, learned_positions=True, norm="layer", mlp_act="gelu", tie_embeddings=True,
        qkv_bias=True, o_bias=True, mlp_bias=True, eos_token_ids=(50256,),
    ),
    "olmo2": small(2, norm_eps=1e-5, rope_theta=5e5, pre_norm=False, post_norm=True, qk_norm="full", eos_token_ids=(50279,)),
    "deepseek-v3": small(
        4, head_dim=20, latent=Latent(kv_rank=16, rope_dim=8, value_dim=12, q_rank=24), eos_token_ids=(1,),
        experts=Experts(4, 2, 24, n_shared=1, dense_layers=(0,), gate="sigmoid", scale=2.5, n_groups=2, n_groups_active=1),
    ),
    "gpt-oss": small(
        2, head_dim=16, norm_eps=1e-5, rope_theta=150000.0, qkv_bias=True, o_bias=True, mlp_bias=True, sliding_window=6,
        window_pattern=(True, False), attn_sinks=True, mlp_act="clamped_swiglu", act_limit=7.0, act_alpha=1.702,
        experts=Experts(4, 2, 80, gate="topk_softmax", router_bias=True), eos_token_ids=(1,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_golden_case_is_what_it_is_by_hand(name):
    assert ModelConfig.from_hf(GOLDEN / name) == BY_HAND[name]


def test_every_family_has_a_golden_case():
    assert {config_json(path.name)["model_type"] for path in GOLDEN.iterdir()} == set(FAMILIES)


# ---- published files, in the words of their day


QWEN = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02,
    "max_position_embeddings": 8192, "model_type": "gemma2", "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
    "use_cache": True, "vocab_size": 256000, "_attn_implementation": "eager",
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma3_text", "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
}  # fmt: skip
PUBLISHED = {
    "mixtral-8x7b-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2.5-7b": QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_mrope": False, "vocab_size": 152064,
    },
    "qwen3-0.6b": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None,
        "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 151936,
    },
    "gemma-2-2b": GEMMA2 | {
        "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    },
    "gemma-2-27b": GEMMA2 | {
        "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_hidden_layers": 46,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
    },
    "gemma-3-1b": GEMMA3 | {
        "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rope_scaling": None, "sliding_window": 512, "vocab_size": 262144,
    },
    "gemma-3-27b": GEMMA3 | {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "vocab_size": 262208,
    },
    "phi-3-mini-4k": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
        "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32064,
    },
    "gpt-2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "predict_special_tokens": True, "output_past": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "olmo-2-7b": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": False, "vocab_size": 100352,
    },
    # The two below are published with a quantization_config, which is refused; here without it.
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "aux_loss_alpha": 0.001, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "pad_token_id": 199999, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_preset_of_its_name(name):
    assert replace(ModelConfig.from_hf(PUBLISHED[name]), eos_token_ids=()) == npinfer.preset(name)


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"gpt-2"}))
def test_a_published_file_as_newer_versions_would_write_it(name):
    older = PUBLISHED[name]
    moved = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "torch_dtype", "num_experts")
    newer = {key: value for key, value in older.items() if key not in moved} | {"dtype": "bfloat16"}
    rope = {"rope_theta": older["rope_theta"], "rope_type": "default", **(older.get("rope_scaling") or {})}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    if older["model_type"] == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": older["rope_local_base_freq"]}
        rope = {"full_attention": rope, "sliding_attention": local}
        kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(older["num_hidden_layers"])]
        newer |= {"layer_types": kinds, "_sliding_window_pattern": 6}
    if "num_experts" in older:
        newer["num_local_experts"] = older["num_experts"]
    assert ModelConfig.from_hf(newer | {"rope_parameters": rope}) == ModelConfig.from_hf(older)


# ---- stretched RoPE


def stretched(name="llama-gqa", **settings):
    return changed(name, rope_parameters={"rope_theta": 1e4, **settings}).rope_scaling


def test_kinds_of_stretching():
    assert stretched(rope_type="linear", factor=4.0) == LinearScaling(4.0)
    assert stretched(rope_type="dynamic", factor=2.0) == DynamicScaling(2.0, 512)  # of max_position_embeddings
    assert stretched(rope_type="yarn", factor=4.0) == YarnScaling(4.0, 512)
    assert stretched(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16, truncate=False) == (
        YarnScaling(4.0, 128, beta_fast=16.0, truncate=False)
    )
    assert stretched(rope_type="yarn", factor=4.0, attention_factor=None, beta_slow=None) == YarnScaling(4.0, 512)


def test_yarn_multiplies_cosines_by():
    # 0.1 ln(40) + 1 = 1.36888...; with both mscales the ratio of 0.1 m ln(40) + 1
    assert stretched(rope_type="yarn", factor=40).attention_factor == pytest.approx(1.3688879454113936)
    both = stretched(rope_type="yarn", factor=40, mscale=1.0, mscale_all_dim=0.5)
    assert both.attention_factor == pytest.approx(1.3688879454113936 / 1.1844439727056968)
    assert stretched(rope_type="yarn", factor=40, mscale=0.5).attention_factor == pytest.approx(1.3688879454113936)
    assert stretched(rope_type="yarn", factor=40, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.5).attention_factor == 1.5


def test_a_latent_squares_yarns_factor_into_its_scale():
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    config = changed("deepseek-v3", rope_parameters=rope | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert config.rope_scaling.attention_factor == 1
    assert config.attn_scale == pytest.approx(1.3688879454113936**2 / math.sqrt(20))
    assert changed("deepseek-v3", rope_parameters=rope).attn_scale is None
    assert changed("deepseek-v3", rope_parameters={"rope_theta": 1e4, "mscale_all_dim": 1.0}).attn_scale is None  # no YaRN


@pytest.mark.parametrize("settings, match", [
    ({"rope_type": "linear"}, "rope type linear takes exactly factor; missing or unknown: factor"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "missing or unknown: beta_fast"),
    ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "missing or unknown: alpha"),
    ({"rope_type": "yarn", "factor": 2.0, "finetuned": True}, "missing or unknown: finetuned"),
    ({"rope_type": "yarn", "factor": 2.0, "mscale": -1, "mscale_all_dim": 1}, "mscale is -1, expected a positive number"),
    ({"rope_type": "yarn", "factor": None}, "factor is None, expected a positive number"),
    ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "rope_type is 'yarn' and type 'linear'; which one"),
    ({"rope_type": ["yarn"]}, r"rope type is \['yarn'\], which is not supported"),
])
def test_stretchings_that_are_refused(settings, match):
    refused(match, "llama-gqa", rope_parameters={"rope_theta": 1e4, **settings})


def test_dynamic_stretching_needs_the_trained_context():
    rope = {"rope_type": "dynamic", "factor": 2.0}
    refused("original_max_context is None", "llama-gqa", "max_position_embeddings", rope_scaling=rope)


# ---- what families leave out


def test_defaults_are_those_of_the_families_classes():
    assert changed("gemma2", "attn_logit_softcapping", "final_logit_softcapping") == BY_HAND["gemma2"]
    assert changed("gemma2", attn_logit_softcapping=None).attn_softcap is None
    assert changed("gemma2", "layer_types") == BY_HAND["gemma2"]
    assert changed("gemma2", "tie_word_embeddings") == BY_HAND["gemma2"]
    assert changed("gemma2", "query_pre_attn_scalar").attn_scale == 256**-0.5
    assert changed("gemma3", "layer_types", "_sliding_window_pattern", num_hidden_layers=7).windows == (*[6] * 5, None, 6)
    assert changed("gemma3", "layer_types", "_sliding_window_pattern", sliding_window_pattern=2).windows == (6, None, 6, None)
    assert changed("gemma3", "rope_parameters").rope_scaling is None
    assert changed("gemma3", "rope_parameters").rope_theta == 1e6
    assert changed("gemma3", "rope_parameters").local_rope_theta == 1e4
    assert changed("qwen3-qknorm", "head_dim").head_dim == 128
    assert changed("mixtral-moe", "rope_parameters").rope_theta == 1e6
    assert changed("mixtral-moe", "num_local_experts").experts.n_experts == 8
    assert changed("qwen3-moe", "norm_topk_prob").experts.renormalise is False
    assert changed("gpt-oss", "rope_parameters").rope_scaling == YarnScaling(32.0, 4096, truncate=False)
    assert changed("gpt-oss", "rope_parameters").rope_theta == 150000
    assert changed("gpt-oss", "layer_types", "swiglu_alpha", "swiglu_limit", "attention_bias") == BY_HAND["gpt-oss"]
    assert changed("gpt2", "n_inner", "tie_word_embeddings", "layer_norm_epsilon", "activation_function") == BY_HAND["gpt2"]
    assert changed("gpt2", "n_positions").max_context == 1024
    assert changed("gpt2", n_inner=50).d_ff == 50


def test_layers_that_have_experts():
    config = changed("qwen3-moe", num_hidden_layers=6, mlp_only_layers=[1, 9], decoder_sparse_step=2)
    assert config.experts.dense_layers == (0, 1, 2, 4)
    assert changed("qwen3-moe", mlp_only_layers=None).experts.dense_layers == ()
    assert changed("deepseek-v3", first_k_dense_replace=2**31).experts.dense_layers == (0, 1)
    assert changed("deepseek-v3", first_k_dense_replace=0).experts.dense_layers == ()
    refused("mlp_only_layers is 3, expected a list", "qwen3-moe", mlp_only_layers=3)
    refused("decoder_sparse_step is 0, expected from 1", "qwen3-moe", decoder_sparse_step=0)


@pytest.mark.parametrize("name", ["qwen2-bias", "qwen3-qknorm"])
def test_windows_behind_a_switch(name):
    def windows(**keys):
        return changed(name, "layer_types", num_hidden_layers=3, sliding_window=8, **keys).windows

    assert windows() == windows(use_sliding_window=True) == (None, None, None)  # max_window_layers is 28
    assert windows(use_sliding_window=True, max_window_layers=1) == (None, 8, 8)
    assert windows(use_sliding_window=False, max_window_layers=1) == (None, None, None)
    assert changed("qwen3-moe", sliding_window=8, use_sliding_window=True).windows == (8, 8)
    refused("no sliding_window, or use_sliding_window is false", name, layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize("types, pattern", [
    ("sfsf", (True, False)), ("sssf", (True, True, True, False)), ("ssss", (True,)), ("fsfs", (False, True)),
    ("sfss", (True, False, True)),
])
def test_the_pattern_of_windows_is_the_shortest_that_repeats(types, pattern):
    names = [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in types]
    config = changed("gemma3", layer_types=names)
    assert config.window_pattern == pattern
    assert config.windows == tuple([6 if letter == "s" else None for letter in types])


def test_no_window_at_all_is_none():
    config = changed("gemma3", layer_types=["full_attention"] * 4)
    assert config.sliding_window is None
    assert config == replace(BY_HAND["gemma3"], sliding_window=None, window_pattern=(True,))


@pytest.mark.parametrize("types", [
    ["sliding_attention"], ["full_attention"] * 5, "full_attention", ["chunked_attention"] * 4, [None] * 4, 4,
])  # fmt: skip
def test_layer_types_that_are_none(types):
    refused("layer_types is .*, expected one of .*_attention for each of 4 layers", "gemma3", layer_types=types)


def test_a_part_of_a_head_is_rotated():
    rope = {"rope_theta": 1e4, "rope_type": "default"}
    assert changed("phi3-fused", rope_parameters=rope | {"partial_rotary_factor": 0.5}).rotary_dim == 4
    assert changed("phi3-fused", "rope_parameters", partial_rotary_factor=0.75).rotary_dim == 6
    assert changed("phi3-fused", "rope_parameters", head_dim=16, partial_rotary_factor=0.5).rotary_dim == 8
    for factor, expected in ((2, "at most 1"), (0, "a positive number")):
        part = {"partial_rotary_factor": factor}
        refused(f"partial_rotary_factor is {factor}, expected {expected}", "phi3-fused", rope_parameters=rope | part)


# ---- refused by name


@pytest.mark.parametrize("name, keys, match", [
    ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "the key 'quantization_config' .*mxfp4"),
    ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "the key 'quantization_config' .*fp8"),
    ("gemma3", {"vision_config": {"hidden_size": 8}}, "the key 'vision_config'"),
    ("gemma3", {"model_type": "gemma3"}, "model_type is 'gemma3', which is not supported"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "the key 'attn_logit_softcapping'"),
    ("gemma3", {"use_bidirectional_attention": True}, "the key 'use_bidirectional_attention'"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "expected to hold full_attention and sliding_attention"),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"type": "linear"}}}, "rope type is 'linear'.*supported: default"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_act is 'gelu', supported: gelu_pytorch_tanh"),
    ("gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu' and hidden_activation 'gelu_pytorch_tanh'; which one"),
    ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'default' but has full_attention"),
    ("phi3-fused", {"rope_scaling": {"type": "longrope"}}, "rope_type is 'default' and type 'longrope'; which one"),
    ("phi3-fused", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "rope type is 'su', which is not supported"),
    ("phi3-fused", {"rope_parameters": {"rope_type": "longrope"}}, "rope type is 'longrope', which is not supported"),
    ("phi3-fused", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type is 'yarn'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "the key 'scale_attn_by_inverse_layer_idx'"),
    ("gpt2", {"scale_attn_weights": False}, "the key 'scale_attn_weights' is False, expected True"),
    ("gpt2", {"add_cross_attention": True}, "the key 'add_cross_attention'"),
    ("gpt2", {"rope_theta": 1e4}, "the key 'rope_theta'"),
    ("gpt2", {"activation_function": "gelu"}, "hidden_act is 'gelu', supported: gelu_new"),
    ("gpt2", {"n_ctx": 64}, "n_positions is 128 and n_ctx 64; which one"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "the key 'scoring_func' is 'softmax', expected 'sigmoid'"),
    ("deepseek-v3", {"topk_method": "greedy"}, "the key 'topk_method' is 'greedy'"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "the key 'moe_layer_freq' is 2"),
    ("deepseek-v3", {"attention_bias": True}, "the key 'attention_bias'"),
    ("deepseek-v3", {"head_dim": 16}, "head_dim is 16, expected 8 with qk_nope_head_dim 12"),
    ("deepseek-v3", {"qk_head_dim": 8}, "qk_head_dim is 8, expected 20"),
    ("deepseek-v3", {"num_key_value_heads": 2}, "n_kv_heads equal to n_heads"),
    ("deepseek-v3", {"n_group": 3}, "n_groups is 3"),
    ("deepseek-v3", {"n_shared_experts": None}, "n_shared is None"),
    ("deepseek-v3", {"rope_interleave": "yes"}, "rope_interleave is 'yes', expected true or false"),
    ("mixtral-moe", {"num_experts": 8}, "num_local_experts is 4 and num_experts 8; which one"),
    ("mixtral-moe", {"num_experts_per_tok": 5}, "n_active is 5, expected at most n_experts 4"),
    ("mixtral-moe", {"num_local_experts": None}, "n_experts is None, expected a whole number"),
    ("qwen2-bias", {"attention_bias": True}, "the key 'attention_bias'"),
    ("olmo2", {"clip_qkv": 8.0}, "the key 'clip_qkv'"),
    ("olmo2", {"layer_types": ["full_attention", "sliding_attention"]}, "the key 'layer_types'"),
    ("gpt-oss", {"swiglu_limit": 0}, "act_limit is 0, expected a positive number"),
])  # fmt: skip
def test_what_is_not_run_is_refused_by_name(name, keys, match):
    refused(match, name, **keys)


# ---- anything at all


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 9), st.just(10**400), st.floats(),
    st.text(max_size=3),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 1, None]), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "mscale", "mscale_all_dim", "full_attention", "other"]),
        st.sampled_from(["yarn", "linear", "dynamic", 0, 1, 2.5, 1e308, -1.0, None, {}, {"factor": 2}]),
    ),
)  # fmt: skip
KEYS = sorted({"num_experts", "other"}.union(*[config_json(path.name) for path in GOLDEN.iterdir()]))
keys = st.sampled_from(KEYS)


@given(st.sampled_from(sorted(BY_HAND)), st.dictionaries(keys, VALUES, max_size=4), st.sets(keys, max_size=2))
def test_any_values_give_a_config_or_one_clear_error(name, keys, removed):
    try:
        assert isinstance(changed(name, *removed, **keys), ModelConfig)
    except ConfigError as error:
        assert str(error).startswith("config: ") and "\n" not in str(error) and len(str(error)) < 1000
