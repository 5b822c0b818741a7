"""The families of published models: what each has of its own is a row of `FAMILIES`.

Data where data can say it, and a function of `npinfer.familyparts` where it cannot.

Source of names and defaults: github.com/huggingface/transformers, configuration_<family>.py
and modeling_<family>.py in src/transformers/models/<family>/.
"""

from typing import NamedTuple

from npinfer.familyparts import (
    first_dense, latent, one_rope, partial_rope, query_scale, some_dense, two_ropes, windows_above, windows_but_each,
    windows_everywhere, windows_if_used,
)  # fmt: skip
from npinfer.layouts import Stored


OUTSIDE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


class Family(NamedTuple):
    """What a model_type has of its own.

    Attributes
    ----------
    architecture : str
        Its class with a language-model head.
    parts : tuple of functions
        Each takes (keys, fields) and adds to the fields, in this order.
    fields : dict
        Fields of ModelConfig that are always so.
    options : dict
        Published key -> field, beside those that all families have; null leaves the field's default.
    flags : dict
        Published boolean -> the fields that it sets.
    experts : dict
        Published key -> field of Experts.
    defaults : dict
        Published key -> its value where the file leaves it out.
    constants : dict
        Published key -> the only value that is run.
    acts : dict
        Published activation -> mlp_act.
    mlp_ratio : int, optional
        d_ff in multiples of d_model where the file leaves it out.
    prefix, layers : str
        What names of tensors begin with, and those of a layer before its number.
    outside, inside, experts_inside : dict
        Tensor of ours -> its published name, or `Stored`: outside the layers, in one, of an expert in one.
    ignored : str
        Tensors that follow from the config or are not run, a regular expression.
    gain_offset : float
        What gains of norms are more than what is stored of them.
    """

    architecture: str
    parts: tuple
    fields: dict = {}
    options: dict = {}
    flags: dict = {}
    experts: dict = {}
    defaults: dict = {}
    constants: dict = {}
    acts: dict = {"silu": "swiglu", "swish": "swiglu"}
    mlp_ratio: int | None = None
    prefix: str = "model."
    layers: str = "model.layers."
    outside: dict = OUTSIDE
    inside: dict = {}
    experts_inside: dict = {}
    ignored: str = r".*rotary_emb\.inv_freq"
    gain_offset: float = 0.0


ATTENTION = {f"{name}_proj": f"self_attn.{name}_proj.weight" for name in "qkvo"}
QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
MLP = {f"{name}_proj": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
PRE_NORMS = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
POST_NORMS = {"post_attn_norm": "post_attention_layernorm.weight", "post_mlp_norm": "post_feedforward_layernorm.weight"}
BOTH_NORMS = POST_NORMS | {"attn_norm": "input_layernorm.weight", "mlp_norm": "pre_feedforward_layernorm.weight"}
LLAMA = ATTENTION | MLP | PRE_NORMS
MLP_EXPERTS = {f"{name}_proj": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}

ALL_BIASES = {"attention_bias": ("qkv_bias", "o_bias")}
EXPERTS = {"num_local_experts": "n_experts", "num_experts_per_tok": "n_active"}
GEMMA = dict(
    fields={"post_norm": True, "scale_embeddings": True},
    flags=ALL_BIASES,
    acts={"gelu_pytorch_tanh": "geglu"},
    gain_offset=1.0,
)
GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
GPT2_QKV = Stored("attn.c_attn.weight", fused=("q_proj", "k_proj", "v_proj"), transposed=True)
PHI3_QKV = Stored("self_attn.qkv_proj.weight", fused=("q_proj", "k_proj", "v_proj"))
PHI3_GATE_UP = Stored("mlp.gate_up_proj.weight", fused=("gate_proj", "up_proj"))
GPT_OSS_GATE_UP = Stored("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), woven=True, transposed=True, stacked=True)

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        (one_rope,),
        flags=ALL_BIASES | {"mlp_bias": ("mlp_bias",)},
        defaults={"rms_norm_eps": 1e-6},
        inside=LLAMA,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        (one_rope, windows_everywhere),
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        inside=LLAMA,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (one_rope, windows_everywhere),
        experts=EXPERTS | {"intermediate_size": "d_ff"},
        defaults={
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        inside=ATTENTION | PRE_NORMS | {"router": "block_sparse_moe.gate.weight"},
        experts_inside={
            "gate_proj": "block_sparse_moe.experts.{expert}.w1.weight",
            "up_proj": "block_sparse_moe.experts.{expert}.w3.weight",
            "down_proj": "block_sparse_moe.experts.{expert}.w2.weight",
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", (one_rope, windows_above), fields={"qkv_bias": True}, defaults=QWEN_DEFAULTS, inside=LLAMA
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (one_rope, windows_above),
        fields={"qk_norm": "head"},
        flags=ALL_BIASES,
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
        inside=LLAMA | QK_NORMS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (one_rope, windows_if_used, some_dense),
        fields={"qk_norm": "head"},
        flags=ALL_BIASES,
        experts=EXPERTS | {"moe_intermediate_size": "d_ff", "norm_topk_prob": "renormalise"},
        defaults=QWEN_DEFAULTS | {
            "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1,
        },
        inside=LLAMA | QK_NORMS | {"router": "mlp.gate.weight"},
        experts_inside=MLP_EXPERTS,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        (one_rope, windows_but_each, query_scale),
        options={"attn_logit_softcapping": "attn_softcap", "final_logit_softcapping": "final_softcap"},
        defaults=GEMMA_DEFAULTS | {
            "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        inside=ATTENTION | MLP | BOTH_NORMS,
        **GEMMA,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (two_ropes, windows_but_each, query_scale),
        options={"final_logit_softcapping": "final_softcap"},
        defaults=GEMMA_DEFAULTS | {"sliding_window_pattern": 6, "rope_theta": 1e6},
        inside=ATTENTION | MLP | BOTH_NORMS | QK_NORMS,
        **GEMMA | {"fields": GEMMA["fields"] | {"qk_norm": "head"}},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        (partial_rope, windows_everywhere),
        defaults={"rms_norm_eps": 1e-5},
        inside=LLAMA | {name: PHI3_QKV for name in PHI3_QKV.fused} | {name: PHI3_GATE_UP for name in PHI3_GATE_UP.fused},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        (),
        fields={
            "learned_positions": True, "norm": "layer", "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        },
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "gelu_new",
        },
        constants={"scale_attn_weights": True},
        acts={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
        mlp_ratio=4,
        prefix="transformer.",
        layers="transformer.h.",
        outside={
            "embed": "transformer.wte.weight", "positions": "transformer.wpe.weight", "final_norm": "transformer.ln_f.weight",
            "lm_head": "lm_head.weight",
        },
        inside={name: GPT2_QKV for name in GPT2_QKV.fused} | {
            "attn_norm": "ln_1.weight", "mlp_norm": "ln_2.weight",
            "o_proj": Stored("attn.c_proj.weight", transposed=True),
            "up_proj": Stored("mlp.c_fc.weight", transposed=True),
            "down_proj": Stored("mlp.c_proj.weight", transposed=True),
        },
        ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        (one_rope,),
        fields={"pre_norm": False, "post_norm": True, "qk_norm": "full"},
        flags=ALL_BIASES,
        defaults={"rms_norm_eps": 1e-5},
        inside=ATTENTION | MLP | POST_NORMS | QK_NORMS,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (one_rope, latent, first_dense),
        fields={"experts": {"gate": "sigmoid"}},
        experts=EXPERTS | {
            "moe_intermediate_size": "d_ff", "n_shared_experts": "n_shared", "norm_topk_prob": "renormalise",
            "routed_scaling_factor": "scale", "n_group": "n_groups", "topk_group": "n_groups_active",
        },
        defaults={
            "rms_norm_eps": 1e-6, "num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "rope_interleave": True, "num_nextn_predict_layers": 0,
        },
        constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        inside=LLAMA | {
            "q_down": "self_attn.q_a_proj.weight",
            "q_norm": "self_attn.q_a_layernorm.weight",
            "q_up": Stored("self_attn.q_b_proj.weight", interleaved="heads"),
            "q_proj": Stored("self_attn.q_proj.weight", interleaved="heads"),
            "kv_down": Stored("self_attn.kv_a_proj_with_mqa.weight", interleaved="rows"),
            "k_norm": "self_attn.kv_a_layernorm.weight",
            "kv_expand": "self_attn.kv_b_proj.weight",
            "router": "mlp.gate.weight",
            "router_correction": "mlp.gate.e_score_correction_bias",
        } | {f"shared_{name}": stored.replace("mlp.", "mlp.shared_experts.") for name, stored in MLP.items()},
        experts_inside=MLP_EXPERTS,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (one_rope, windows_but_each),
        fields={"attn_sinks": True, "mlp_bias": True, "experts": {"gate": "topk_softmax", "router_bias": True}},
        options={"swiglu_limit": "act_limit", "swiglu_alpha": "act_alpha"},
        flags=ALL_BIASES,
        experts=EXPERTS | {"intermediate_size": "d_ff"},
        defaults={
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128,
            "sliding_window_pattern": 2, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        acts={"silu": "clamped_swiglu"},
        inside=ATTENTION | PRE_NORMS | {"sinks": "self_attn.sinks", "router": "mlp.router.weight"},
        experts_inside={
            "gate_proj": GPT_OSS_GATE_UP,
            "up_proj": GPT_OSS_GATE_UP,
            "down_proj": Stored("mlp.experts.down_proj", transposed=True, stacked=True),
            "gate_proj.bias": GPT_OSS_GATE_UP._replace(name="mlp.experts.gate_up_proj_bias", transposed=False),
            "up_proj.bias": GPT_OSS_GATE_UP._replace(name="mlp.experts.gate_up_proj_bias", transposed=False),
            "down_proj.bias": Stored("mlp.experts.down_proj_bias", stacked=True),
        },
    ),
}
