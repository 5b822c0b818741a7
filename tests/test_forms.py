"""Closed forms of every family: held to published numbers and to arithmetic worked by hand.

The configs are written out here, from the published files, so that nothing of
the reading of those files is in the way.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import formulas, loads, predict
from costmodel.experts import expected_share
from costmodel.formulas import decode_counts_total, forward_counts
from costmodel.operations import Cost, operation_costs, operation_counts
from npinfer import Counts, Experts, InputError, Latent, ModelConfig, Precision
from strategies import FP32, any_config, exceptions, precisions

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 80, "vocab_size": 101}
GROUPED = {**SHAPE, "n_kv_heads": 2}

# config.json of each case of the golden folder, in this package's words.
CASES = {
    "deepseek-v3": ModelConfig(
        **SHAPE, head_dim=20, latent=Latent(kv_rank=16, rope_dim=8, value_dim=12, q_rank=24),
        experts=Experts(
            n_experts=4, n_active=2, d_ff=24, n_shared=1, dense_layers=(0,), gate="sigmoid", scale=2.5,
            n_groups=2, n_groups_active=1,
        ),
    ),
    "gemma2": ModelConfig(
        **GROUPED, head_dim=16, tie_embeddings=True, sliding_window=8, window_pattern=(True, False), post_norm=True,
        mlp_act="geglu", attn_softcap=50.0, final_softcap=30.0, scale_embeddings=True,
    ),
    "gemma3": ModelConfig(
        **GROUPED | {"n_layers": 4}, head_dim=16, tie_embeddings=True, sliding_window=6,
        window_pattern=(True, True, False, True), post_norm=True, qk_norm="head", mlp_act="geglu", scale_embeddings=True,
    ),
    "gpt-oss": ModelConfig(
        **GROUPED, head_dim=16, qkv_bias=True, o_bias=True, mlp_bias=True, sliding_window=6, window_pattern=(True, False),
        attn_sinks=True, mlp_act="clamped_swiglu", act_limit=7.0, act_alpha=1.702,
        experts=Experts(n_experts=4, n_active=2, d_ff=80, gate="topk_softmax", router_bias=True),
    ),
    "gpt2": ModelConfig(
        **SHAPE | {"d_ff": 128}, tie_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True, learned_positions=True,
        max_context=128, norm="layer", mlp_act="gelu",
    ),
    "llama-bf16-sharded": ModelConfig(**GROUPED),
    "llama-gqa": ModelConfig(**GROUPED),
    "llama-mha-tied": ModelConfig(**SHAPE, tie_embeddings=True),
    "llama-mqa-bias": ModelConfig(**SHAPE, n_kv_heads=1, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama3-scaled-rope": ModelConfig(**GROUPED),
    "mistral-window": ModelConfig(**GROUPED, head_dim=16, sliding_window=8),
    "mixtral-moe": ModelConfig(**GROUPED, experts=Experts(n_experts=4, n_active=2, d_ff=80)),
    "olmo2": ModelConfig(**GROUPED, pre_norm=False, post_norm=True, qk_norm="full"),
    "phi3-fused": ModelConfig(**SHAPE),
    "qwen2-bias": ModelConfig(**GROUPED, qkv_bias=True),
    "qwen3-moe": ModelConfig(
        **GROUPED, head_dim=16, qk_norm="head", experts=Experts(n_experts=5, n_active=2, d_ff=24, dense_layers=(0,)),
    ),
    "qwen3-qknorm": ModelConfig(**GROUPED, head_dim=16, qk_norm="head"),
}  # fmt: skip


# What an independent implementation of the same case counted as it ran: batch, n_prompt, FLOPs of matrix products of
# a whole forward with logits at every position, of one with logits at the last, and of the decode step after it; parameters.
COUNTED = {
    "deepseek-v3": (1, 17, 1_202_240, 1_098_816, 175_680, 39_088),
    "gemma2": (1, 22, 1_606_528, 1_470_784, 69_696, 31_168),
    "gemma3": (1, 21, 2_909_760, 2_780_480, 127_296, 59_200),
    "gpt-oss": (1, 19, 1_951_680, 1_835_328, 99_648, 82_480),
    "gpt2": (2, 16, 1_910_784, 1_716_864, 119_936, 32_800),
    "llama-bf16-sharded": (1, 14, 742_784, 658_752, 53_312, 28_128),
    "llama-gqa": (2, 19, 2_064_768, 1_832_064, 109_184, 28_128),
    "llama-mha-tied": (1, 23, 1_367_488, 1_225_280, 59_712, 26_944),
    "llama-mqa-bias": (1, 17, 880_192, 776_768, 52_032, 27_648),
    "llama3-scaled-rope": (1, 80, 5_596_160, 5_085_504, 70_208, 28_128),
    "mistral-window": (2, 29, 4_443_264, 4_081_280, 131_712, 34_272),
    "mixtral-moe": (1, 20, 1_716_480, 1_593_664, 86_080, 74_464),
    "olmo2": (1, 18, 973_440, 863_552, 54_336, 28_224),
    "phi3-fused": (1, 16, 922_624, 825_664, 57_920, 30_176),
    "qwen2-bias": (1, 21, 1_151_808, 1_022_528, 55_104, 28_256),
    "qwen3-moe": (1, 19, 1_247_616, 1_131_264, 66_176, 38_336),
    "qwen3-qknorm": (2, 18, 2_555_136, 2_335_360, 142_976, 34_336),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flops_and_parameters_of_an_independent_implementation(case):
    config, (batch, n_prompt, *flops, n_parameters) = CASES[case], COUNTED[case]
    forwards = [(0, n_prompt, True), (0, n_prompt, False), (n_prompt, 1, False)]
    counted = [forward_counts(config, FP32, batch, *forward) for forward in forwards]
    assert [counts.matmul_flops for counts in counted] == flops
    # The router's correction, one number for each expert, is stored and is no parameter.
    correction = 4 if case == "deepseek-v3" else 0
    assert formulas.n_parameters(config) == n_parameters
    assert formulas.weight_bytes(config, FP32) == 4 * (n_parameters + correction)


PUBLISHED = [  # (config, parameters, those of one token, KV bytes of a token at fp16)
    (
        ModelConfig(
            n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, vocab_size=32000,
            experts=Experts(n_experts=8, n_active=2, d_ff=14336), name="Mixtral-8x7B",
        ),
        46_702_792_704, 12_879_925_248, 131_072,
    ),
    (
        ModelConfig(
            n_layers=48, d_model=2048, n_heads=32, n_kv_heads=4, head_dim=128, d_ff=6144, vocab_size=151936,
            qk_norm="head", experts=Experts(n_experts=128, n_active=8, d_ff=768), name="Qwen3-30B-A3B",
        ),
        30_532_122_624, 3_353_032_704, 98_304,
    ),
    (
        ModelConfig(
            n_layers=61, d_model=7168, n_heads=128, head_dim=192, d_ff=18432, vocab_size=129280,
            latent=Latent(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536),
            experts=Experts(
                n_experts=256, n_active=8, d_ff=2048, n_shared=1, dense_layers=(0, 1, 2), gate="sigmoid", n_groups=8,
                n_groups_active=4, scale=2.5,
            ),
            name="DeepSeek-V3",
        ),
        # published: 671,026,419,200 and 37,552,297,472, with 58 layers * 256 corrections of the gate
        671_026_419_200 - 58 * 256, 37_552_297_472 - 58 * 256, 70_272,
    ),
    (
        ModelConfig(
            n_layers=24, d_model=2880, n_heads=64, n_kv_heads=8, head_dim=64, d_ff=2880, vocab_size=201088, qkv_bias=True,
            o_bias=True, mlp_bias=True, attn_sinks=True, mlp_act="clamped_swiglu", act_limit=7.0, act_alpha=1.702,
            experts=Experts(n_experts=32, n_active=4, d_ff=2880, gate="topk_softmax", router_bias=True), name="gpt-oss-20b",
        ),
        20_914_757_184, 4_187_440_704, 49_152,
    ),
    (
        ModelConfig(
            n_layers=48, d_model=1600, n_heads=25, d_ff=6400, vocab_size=50257, tie_embeddings=True, qkv_bias=True,
            o_bias=True, mlp_bias=True, learned_positions=True, max_context=1024, norm="layer", mlp_act="gelu", name="GPT-2 XL",
        ),
        1_557_611_200, 1_557_611_200, 307_200,
    ),
    (
        ModelConfig(
            n_layers=26, d_model=2304, n_heads=8, n_kv_heads=4, head_dim=256, d_ff=9216, vocab_size=256000,
            tie_embeddings=True, post_norm=True, mlp_act="geglu", name="Gemma-2-2B",
        ),
        2_614_341_888, 2_614_341_888, 106_496,
    ),
    (
        ModelConfig(
            n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=100352, pre_norm=False, post_norm=True,
            qk_norm="full", name="OLMo-2-7B",
        ),
        7_298_617_344, 7_298_617_344, 524_288,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config, n_all, n_active, kv_bytes", PUBLISHED, ids=[config.name for config, *_ in PUBLISHED])
def test_published_sizes(config, n_all, n_active, kv_bytes):
    assert formulas.n_parameters(config) == n_all
    assert formulas.n_active_parameters(config) == n_active
    assert formulas.kv_bytes_per_token(config, Precision()) == kv_bytes


def test_tables_of_which_rows_are_read_are_not_streamed():
    xl = next(config for config, *_ in PUBLISHED if config.name == "GPT-2 XL")  # tied, 1024 positions of 1600
    assert formulas.n_streamed_parameters(xl) == 1_557_611_200 - 1024 * 1600
    mixtral = PUBLISHED[0][0]
    assert formulas.n_streamed_parameters(mixtral) == 46_702_792_704 - 32000 * 4096
    # Streamed by a step: 2 of 8 experts.
    assert formulas.weight_bytes(mixtral, Precision(), streamed=True) == 2 * (12_879_925_248 - 32000 * 4096)


# ---- each form by hand; fp32, 4 bytes an element


def by_operation(config, batch, n_cached, n_new, precision=FP32, **options):
    return operation_counts(config, precision, loads.forward_load(config, precision, batch, n_cached, n_new, **options))


MIXTURE = ModelConfig(
    n_layers=1, d_model=8, n_heads=2, d_ff=5, vocab_size=9, experts=Experts(n_experts=4, n_active=2, d_ff=6, n_shared=1)
)


def test_a_mixture_of_experts():
    ops = by_operation(MIXTURE, 1, 0, 3)
    # Product 2 * 3 * 8 * 4; softmax of 4 scores 18 and renormalising 2 of them 3, at 3 tokens.
    assert ops["router"] == Counts(192, 0, 63, 4 * 32, 0, 0, 4 * 24, 4 * 12, 0, 0)
    # Routed 2 * 3 * 2 * 8 * 6 = 576, shared 2 * 3 * 8 * 6 = 288. Of 4 experts' 768 bytes 1 - (1/2)**3 = 7/8 are expected.
    assert ops["gate_proj"] == ops["up_proj"] == Counts(864, 0, 0, 672 + 192, 0, 0, 4 * (24 + 24), 4 * (36 + 18), 0, 0)
    assert ops["mlp_act"] == Counts(0, 0, 4 * 54, 0, 0, 0, 4 * 108, 4 * 54, 0, 0)
    # Weighting and summing 2 experts: 3 for each of 8 elements; the 6 weights are read with the 36 inputs.
    assert ops["down_proj"] == Counts(864, 0, 72, 672 + 192, 0, 0, 4 * (36 + 6 + 18), 4 * (24 + 24), 0, 0)
    assert ops["mlp_residual"] == Counts(0, 0, 48, 0, 0, 0, 4 * 96, 4 * 48, 0, 0)  # routed, then shared
    for touched, nbytes in ([3], 3 * 192), ("all", 4 * 192):
        ops = by_operation(MIXTURE, 1, 0, 3, experts_touched=touched)
        assert ops["down_proj"].weight_bytes_read == nbytes + 192
    int4 = by_operation(MIXTURE, 1, 0, 3, Precision("int4"))
    # An expert's 48 weights are 24 bytes and 6 scales: 7/8 of 4 * 36; 7/8 of 4 * 48 are widened, and the shared 48.
    assert (int4["gate_proj"].weight_bytes_read, int4["gate_proj"].elementwise_flops) == (126 + 36, 168 + 48)


@pytest.mark.parametrize("gate, flops", [
    ({"gate": "softmax", "renormalise": False}, 18),
    ({"gate": "topk_softmax"}, 8),  # of 2 scores
    ({"gate": "sigmoid"}, 4 * 4 + 4 + 2),  # 3 for each score and its correction; sum, + 1e-20, 2 divisions; scale
    ({"gate": "sigmoid", "n_groups": 2, "n_groups_active": 1, "renormalise": False}, 16 + 2 + 2),  # a sum in each group
    ({"gate": "topk_softmax", "router_bias": True}, 8 + 4),
])
def test_gates(gate, flops):
    config = replace(MIXTURE, experts=Experts(n_experts=4, n_active=2, d_ff=6, **gate))
    router = by_operation(config, 1, 0, 3)["router"]
    assert router.elementwise_flops == 3 * flops
    more = 4 if gate.get("router_bias") or gate["gate"] == "sigmoid" else 0  # a number for each expert
    assert router.weight_bytes_read == 4 * (32 + more)


def test_latent_attention():
    config = ModelConfig(
        n_layers=1, d_model=8, n_heads=2, head_dim=6, d_ff=5, vocab_size=9,
        latent=Latent(kv_rank=5, rope_dim=2, value_dim=3, q_rank=4),
    )  # fmt: skip
    ops = by_operation(config, 1, 2, 3, Precision("fp32", "int8", "fp32"))  # S = 5, 3 pairs of 15 masked
    assert list(ops)[2:10] == ["q_down", "q_norm", "q_up", "kv_down", "k_norm", "rope", "kv_append", "kv_expand"]
    assert [ops[op].matmul_flops for op in ("q_down", "q_up", "kv_down", "o_proj")] == [192, 288, 336, 2 * 3 * 6 * 8]
    assert [ops[op].elementwise_flops for op in ("q_norm", "k_norm")] == [3 * 18, 3 * 22]
    assert ops["rope"] == Counts(0, 0, 54, 0, 0, 0, 72, 72, 0, 0)  # 3 tokens * (2 heads + 1 key) * 2
    assert ops["kv_append"] == Counts(0, 0, 0, 0, 0, 3 * (7 + 2), 3 * 7 * 4, 0, 0, 0)  # 7 codes and a scale
    # 2 * 5 rows * 5 * 2 heads * (4 + 3); 5 * 7 codes scaled; K and V of 5 rows, 2 heads * (6 + 3).
    assert ops["kv_expand"] == Counts(700, 0, 35, 4 * 14 * 5, 5 * 9, 0, 0, 4 * 90, 0, 0)
    assert ops["attn_scores"] == Counts(360, 72, 30, 0, 0, 0, 4 * (36 + 60), 0, 0, 4 * 30)
    assert ops["attn_mix"] == Counts(180, 36, 0, 0, 0, 0, 4 * 30, 4 * 18, 4 * 30, 0)
    assert formulas.kv_bytes_held(config, Precision(kv="int8"), 5, batch=2) == 2 * 5 * 9


def test_learned_positions_layer_norm_and_gelu():
    config = ModelConfig(
        n_layers=1, d_model=4, n_heads=2, d_ff=5, vocab_size=9, norm="layer", learned_positions=True, max_context=7,
        mlp_act="gelu",
    )  # fmt: skip
    ops = by_operation(config, 2, 1, 3)
    assert not {"rope", "gate_proj"} & ops.keys()
    assert ops["embed"] == Counts(0, 0, 24, 4 * (24 + 12), 0, 0, 0, 96, 0, 0)  # 6 rows, and 3 positions for both sequences
    assert ops["attn_norm"] == Counts(0, 0, 6 * 30, 32, 0, 0, 96, 96, 0, 0)
    assert ops["mlp_act"] == Counts(0, 0, 9 * 30, 0, 0, 0, 120, 120, 0, 0)


def test_sinks_caps_norms_of_heads_and_a_part_rotated():
    config = ModelConfig(
        n_layers=1, d_model=8, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=5, vocab_size=9, attn_sinks=True, attn_softcap=5.0,
        final_softcap=3.0, qk_norm="head", rotary_dim=2, scale_embeddings=True, post_norm=True, mlp_act="geglu",
    )  # fmt: skip
    ops = by_operation(config, 1, 2, 3)
    assert ops["embed"].elementwise_flops == 24
    assert ops["attn_scores"].elementwise_flops == 4 * 30  # scale, and 3 of the cap, for 2 * 3 * 5 scores
    # 6 rows of 5 scores and a sink: 5 * 6 - 2.
    assert ops["softmax"] == Counts(0, 0, 168, 8, 0, 0, 0, 0, 144, 144)
    assert ops["q_norm"] == Counts(0, 0, 6 * 18, 16, 0, 0, 96, 96, 0, 0)
    assert ops["k_norm"] == Counts(0, 0, 3 * 18, 16, 0, 0, 48, 48, 0, 0)
    assert ops["rope"] == Counts(0, 0, 3 * 3 * 3 * 2, 0, 0, 0, 144, 144, 0, 0)  # 3 heads, moved whole
    assert ops["post_attn_norm"] == ops["post_mlp_norm"] == ops["attn_norm"] == Counts(0, 0, 102, 32, 0, 0, 96, 96, 0, 0)
    assert ops["mlp_act"].elementwise_flops == 10 * 15
    assert ops["lm_head"].elementwise_flops == 27
    whole = by_operation(replace(config, qk_norm="full"), 1, 2, 3)
    assert whole["q_norm"] == Counts(0, 0, 3 * 34, 32, 0, 0, 96, 96, 0, 0)
    clamped = replace(config, mlp_act="clamped_swiglu", act_limit=7.0, act_alpha=1.7)
    assert by_operation(clamped, 1, 2, 3)["mlp_act"].elementwise_flops == 9 * 15


def test_formats_by_tensor():
    config = ModelConfig(n_layers=3, d_model=9, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=5, vocab_size=7, tie_embeddings=True)
    said = (("q_proj", None, "q8_0"), ("q_proj", 1, "q6_k"), ("attn_norm", None, "fp32"), ("embed", None, "int8"))
    ops = by_operation(config, 1, 0, 4, Precision(exceptions=said))
    # 18 weights: 17/2 bits each are 19.125 bytes, 105/16 bits 14.77; no scales are multiplied.
    assert (ops["q_proj"].weight_bytes_read, ops["q_proj"].elementwise_flops) == (2 * 20 + 15, 0)
    assert ops["attn_norm"].weight_bytes_read == 3 * 36
    assert ops["mlp_norm"].weight_bytes_read == 3 * 18
    assert (ops["embed"].weight_bytes_read, ops["embed"].elementwise_flops) == (4 * (9 + 2), 36)
    assert (ops["lm_head"].weight_bytes_read, ops["lm_head"].elementwise_flops) == (7 * (9 + 2), 7)  # one row, 7 outputs


# ---- every mix of them


SOME = exceptions("embed", "q_proj", "down_proj", "kv_expand", "router", "attn_norm", "o_proj.bias", "shared_up_proj")


@given(any_config(), precisions(), SOME)
def test_a_step_reads_what_is_streamed(config, precision, said):
    precision = replace(precision, exceptions=said)
    n_sparse = sum(kind.sparse for kind in config.kinds)
    touched = [config.experts.n_active] * n_sparse if config.experts else []
    ops = by_operation(config, 1, 3, 1, precision, experts_touched=touched)
    read = sum(counts.weight_bytes_read for op, counts in ops.items() if op != "embed")
    assert read == formulas.weight_bytes(config, precision, streamed=True)
    # The correction of a sigmoid gate is stored beside the parameters.
    n_stored = formulas.n_parameters(config)
    if config.experts and config.experts.gate == "sigmoid":
        n_stored += n_sparse * config.experts.n_experts
    assert formulas.weight_bytes(config, FP32) == 4 * n_stored


@given(any_config(), precisions(), SOME, st.integers(1, 3), st.integers(1, 9), st.integers(2, 9))
def test_costs_arrays_and_sums_agree(config, precision, said, batch, n_prompt, n_output):
    precision = replace(precision, exceptions=said)
    load = loads.forward_load(config, precision, batch, n_prompt, n_output)
    counts = operation_counts(config, precision, load)
    assert operation_costs(config, precision, load) == [list(Cost.of(each)) for each in counts.values()]
    for rule in "expected", "all":
        steps = [forward_counts(config, precision, batch, n_prompt + i, 1, experts_touched=rule) for i in range(n_output - 1)]
        assert decode_counts_total(config, precision, batch, n_prompt, n_output, rule) == sum(steps, Counts())
        several = forward_counts(config, precision, np.arange(1, batch + 1), n_prompt, n_output, experts_touched=rule)
        for i in range(batch):
            one = forward_counts(config, precision, i + 1, n_prompt, n_output, experts_touched=rule)
            assert Counts(*[field[i] for field in several]) == one


@given(any_config(), precisions(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_no_routing_is_below_the_floor(config, precision, batch, n_prompt, n_output):
    prediction = predict(config, precision, "rtx-4090", n_prompt, n_output, batch, compute="fp16")
    assert prediction.floor.ttft_s <= prediction.roofline.ttft_s
    experts = config.experts
    if experts is None or experts.n_active == experts.n_experts:
        assert prediction.prefill.least_bytes == prediction.prefill.streamed_bytes
    n_sparse = sum(kind.sparse for kind in config.kinds)
    fewest = [experts.n_active] * n_sparse if experts else []
    least = forward_counts(config, precision, batch, 0, n_prompt, experts_touched=fewest)
    assert prediction.prefill.least_bytes == least.weight_bytes_read + least.kv_bytes


def test_expected_shares_are_pythons_floats():
    experts = Experts(n_experts=128, n_active=8, d_ff=1)
    n_tokens = np.arange(1, 3000)
    assert expected_share(experts, n_tokens).tolist() == [1 - (1 - 8 / 128) ** n for n in range(1, 3000)]


@pytest.mark.parametrize("touched, match", [
    ("most", "experts_touched is 'most', expected 'expected', 'all' or a list"),
    ([], "experts_touched has 0 numbers, expected 1"),
    ([1, 2], "experts_touched has 2 numbers, expected 1"),
    ([0], "experts_touched is 0, expected at least 1"),
    ([5], "experts_touched is 5, expected at most n_experts 4"),
    ([1.5], r"experts_touched is 1\.5, expected a whole number"),
    (np.array([3]), "expected 'expected', 'all' or a list"),
])
def test_experts_touched_refuses(touched, match):
    with pytest.raises(InputError, match=match):
        forward_counts(MIXTURE, FP32, 1, 0, 3, experts_touched=touched)


def test_a_decode_has_no_one_number_of_experts_touched():
    with pytest.raises(InputError, match="expected 'expected' or 'all'"):
        decode_counts_total(MIXTURE, FP32, 1, 3, 4, [2])
