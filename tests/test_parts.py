"""Records that a config is made of refuse what cannot be meant, and say which field it was."""

import re

import numpy as np
import pytest

from npinfer import (
    ConfigError, DynamicScaling, Experts, Latent, Ledger, LinearScaling, ModelConfig, Precision, RopeScaling, Transformer,
    UnknownName, YarnScaling,
)  # fmt: skip

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 8, "vocab_size": 9}
EXPERTS = {"n_experts": 4, "n_active": 2, "d_ff": 3}
LATENT = {"kv_rank": 4, "rope_dim": 2, "value_dim": 3}
SCALINGS = {
    LinearScaling: {"factor": 2.0},
    DynamicScaling: {"factor": 2.0, "original_max_context": 64},
    YarnScaling: {"factor": 2.0, "original_max_context": 64, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0},
    RopeScaling: {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_context": 64},
}


def refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


# ---- single fields


@pytest.mark.parametrize("value", [0, -1, "2", float("nan"), float("inf"), True, None, [2]], ids=repr)
@pytest.mark.parametrize("kind, field", [(kind, field) for kind, right in SCALINGS.items() for field in right])
def test_scalings_refuse_what_is_no_positive_number(kind, field, value):
    if (kind, field, value) == (YarnScaling, "attention_factor", None):
        assert kind(**SCALINGS[kind] | {field: value}).attention_factor == 0.1 * np.log(2.0) + 1  # its default
        return
    kind(**SCALINGS[kind])
    refused(lambda: kind(**SCALINGS[kind] | {field: value}), f"rope_scaling {field} is ")


def test_scalings_refuse_bounds_in_the_wrong_order():
    refused(lambda: RopeScaling(8.0, 4.0, 4.0, 64), "rope_scaling low_freq_factor is 4, expected below high_freq_factor 4")
    wrong = "rope_scaling beta_slow is 32, expected below beta_fast 1"
    refused(lambda: YarnScaling(2.0, 64, beta_fast=1.0, beta_slow=32.0), wrong)
    refused(lambda: YarnScaling(2.0, 64, truncate=1), "rope_scaling truncate is 1, expected true or false")


@pytest.mark.parametrize("change, message", [
    ({"n_experts": 0}, "experts n_experts is 0, expected from 1"), ({"n_experts": True}, "experts n_experts is True"),
    ({"n_experts": "8"}, "experts n_experts is '8', expected a whole number"), ({"d_ff": 1.5}, "experts d_ff is 1.5"),
    ({"n_active": 0}, "experts n_active is 0"), ({"n_active": 5}, "experts n_active is 5, expected at most n_experts 4"),
    ({"n_shared": -1}, "experts n_shared is -1, expected from 0"), ({"dense_layers": (-1,)}, "experts dense_layers is -1"),
    ({"dense_layers": 3}, "experts dense_layers is 3, expected a tuple"),
    ({"dense_layers": "01"}, "experts dense_layers is '01'"),
    ({"dense_layers": None}, "experts dense_layers is None"), ({"dense_layers": (0.5,)}, "experts dense_layers is 0.5"),
    ({"gate": "top1"}, "experts gate is 'top1', expected one of softmax, topk_softmax, sigmoid"),
    ({"gate": None}, "experts gate"),
    ({"renormalise": 1}, "experts renormalise is 1, expected true or false"),
    ({"router_bias": "no"}, "experts router_bias is 'no'"),
    ({"scale": 0}, "experts scale is 0, expected a positive number"), ({"scale": float("nan")}, "experts scale is nan"),
    ({"n_groups": 3}, "experts n_groups is 3 and n_groups_active 1, expected a divisor of n_experts 4"),
    ({"n_groups_active": 2}, "experts n_groups is 1 and n_groups_active 2"), ({"n_groups": 0}, "experts n_groups is 0"),
    ({"n_groups": 4, "n_active": 1}, "experts n_groups is 4, expected at least 2 of the 4 experts in each"),
    ({"n_groups": 2, "n_active": 3}, "experts n_active is 3, more than 1 groups of 2 have"),
], ids=str)  # fmt: skip
def test_experts_refuse_nonsense_by_name(change, message):
    refused(lambda: Experts(**EXPERTS | change), message)


def test_dense_layers_are_kept_in_order_and_once():
    assert Experts(**EXPERTS, dense_layers=[2, 0, 2]).dense_layers == (0, 2)
    assert Experts(**EXPERTS, dense_layers=range(2)) == Experts(**EXPERTS, dense_layers={1, 0})


@pytest.mark.parametrize("field, value", [
    ("kv_rank", 0), ("kv_rank", 1.5), ("rope_dim", True), ("rope_dim", 3), ("value_dim", None), ("value_dim", "4"),
    ("q_rank", 0), ("q_rank", 2.0),
], ids=str)  # fmt: skip
def test_latents_refuse_nonsense_by_name(field, value):
    refused(lambda: Latent(**LATENT | {field: value}), f"latent {field} is {value!r}")


# ---- fields of a config, and fields together


@pytest.mark.parametrize("change, message", [
    ({"norm": "batch"}, "norm is 'batch', expected one of rms, layer"), ({"norm": None}, "norm is None"),
    ({"qk_norm": False}, "qk_norm is False, expected one of None, head, full"), ({"mlp_act": "relu"}, "mlp_act is 'relu'"),
    ({"attn_softcap": 0}, "attn_softcap is 0"), ({"final_softcap": float("nan")}, "final_softcap is nan"),
    ({"attn_scale": -1}, "attn_scale is -1"), ({"local_rope_theta": "x"}, "local_rope_theta is 'x'"),
    ({"rotary_dim": 3}, "rotary_dim is 3, expected an even number"), ({"rotary_dim": 0}, "rotary_dim is 0"),
    ({"rotary_dim": 6}, "6 elements of a head are rotated, expected at most 4"), ({"attn_sinks": 1}, "attn_sinks is 1"),
    ({"pre_norm": None}, "pre_norm is None, expected true or false"), ({"window_pattern": ()}, "window_pattern is ()"),
    ({"window_pattern": (1, 0)}, "window_pattern is 1"), ({"window_pattern": "ab"}, "window_pattern is 'ab'"),
    ({"experts": EXPERTS}, "experts is {'n_experts': 4"), ({"latent": LATENT}, "latent is {'kv_rank': 4"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling is {'factor': 2}"), ({"learned_positions": True}, "needs max_context"),
    ({"pre_norm": False}, "pre_norm and post_norm are both false"),
    ({"act_limit": 7.0}, "act_limit and act_alpha go with mlp_act 'clamped_swiglu', both"),
    ({"act_alpha": 7.0}, "act_limit and act_alpha go with"),
    ({"act_limit": 7.0, "act_alpha": 1.0}, "act_limit and act_alpha go with"),
    ({"mlp_act": "clamped_swiglu"}, "act_limit and act_alpha go with"),
    ({"mlp_act": "clamped_swiglu", "act_limit": 7.0}, "act_limit and act_alpha go with"),
    ({"mlp_act": "gelu", "experts": Experts(**EXPERTS)}, "mlp_act is 'gelu', which has no gate"),
    ({"post_norm": True, "experts": Experts(**EXPERTS, n_shared=1)}, "shared experts do not go with post_norm"),
    ({"rope_theta": 1, "rope_scaling": YarnScaling(2.0, 64)}, "rope_theta is 1, expected above 1"),
], ids=str)  # fmt: skip
def test_configs_refuse_nonsense_by_name(change, message):
    refused(lambda: ModelConfig(**SIZES | change), message)


@pytest.mark.parametrize("change, message", [
    ({"n_kv_heads": 1}, "and without groups"), ({"qk_norm": "head"}, "and without qk_norm"),
    ({"qkv_bias": True}, "without qkv_bias"),
    ({"attn_sinks": True}, "without attn_sinks"), ({"rotary_dim": 2}, "without rotary_dim"),
    ({"learned_positions": True, "max_context": 8, "qkv_bias": True}, "without qkv_bias and learned_positions"),
    ({"head_dim": 2}, "2 elements of a head are rotated, expected at most 1"),
], ids=str)  # fmt: skip
def test_latents_refuse_what_they_have_not(change, message):
    latent = SIZES | {"latent": Latent(**LATENT), "head_dim": 4}
    ModelConfig(**latent)
    refused(lambda: ModelConfig(**latent | change), message)


# ---- formats of single tensors


def test_exceptions_of_a_precision():
    precision = Precision(exceptions=[("q_proj", 1, "fp32"), ("q_proj", None, "q4_k"), ["attn_norm", None, "fp32"]])
    formats = [precision.format_of("q_proj", layer, is_matrix=True) for layer in (0, 1, 2)]
    assert formats == ["q4_k", "fp32", "q4_k"]
    assert precision.format_of("attn_norm", 0, is_matrix=False) == "fp32"
    assert precision.format_of("k_proj", 1, is_matrix=True) == "fp16"
    with pytest.raises(UnknownName, match="no format of q_proj 'int5'; known: fp32"):
        Precision(exceptions=[("q_proj", None, "int5")])
    wrong = "an exception is ('q_proj', 'int4'), expected (tensor, layer or None, format)"
    refused(lambda: Precision(exceptions=[("q_proj", "int4")]), wrong)


def test_layers_that_an_exception_sets_apart_count_apart():
    """Of 3 layers the second stores q_proj (8 x 8) in 4.5 bits: 36 bytes, the others in 128."""
    config = ModelConfig(3, 8, 2, 8, 9)
    model = Transformer.shape_only(config, Precision(exceptions=[("q_proj", 1, "q4_k"), ("final_norm", None, "fp32")]))
    with Ledger() as ledger:
        model.prefill([1, 2], model.new_cache())
    assert [ledger.total(op="q_proj", layer=layer).weight_bytes_read for layer in range(3)] == [128, 36, 128]
    assert ledger.total(op="final_norm").weight_bytes_read == 32
    assert ledger.total(op="attn_norm").weight_bytes_read == 3 * 16
