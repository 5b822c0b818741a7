"""Small models and requests for property tests, and helpers that run them.

Sizes are tiny, so that a failure is readable; every one differs from what it
could be confused with (head_dim is not d_model / n_heads, d_ff no multiple of
anything), so that a formula with the wrong size in it shows.
"""

import numpy as np
from hypothesis import strategies as st

import npinfer
from npinfer import (
    DynamicScaling, Experts, Latent, LinearScaling, ModelConfig, Precision, RopeScaling, Transformer, YarnScaling,
)  # fmt: skip
from npinfer.formats import ALLOWED, FORMATS, NUMERIC
from npinfer.seeded import random_source

# The small shape of the hand-worked cases: 3,840 FLOPs of weights per token and layer, 1,024 for the
# head, 64 for a (query, key) pair in a layer, and 2 layers * 2 * 2 heads * 4 * 4 bytes = 128 bytes of KV per token.
T1 = ModelConfig(
    n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, vocab_size=32, tie_embeddings=True, name="T1"
)
FP32 = Precision(weights="fp32", kv="fp32", activations="fp32")
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=16)

batches = st.integers(1, 3)
chunkings = st.lists(st.integers(1, 4), min_size=1, max_size=4)  # new tokens of each prefill


@st.composite
def configs(draw, windows=st.none() | st.integers(1, 6)):
    """Models with every mix of heads (all of their own, grouped, one shared), window, biases, head and RoPE."""
    n_kv_heads, group = draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (3, 2), (1, 3)]))
    return ModelConfig(
        n_layers=draw(st.integers(1, 3)),
        d_model=draw(st.integers(4, 9)),  # the norm of a row of one or two can be next to nothing, and magnify rounding
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        d_ff=draw(st.integers(1, 8)),
        vocab_size=draw(st.integers(2, 11)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        sliding_window=draw(windows),
        rope_scaling=draw(st.none() | st.just(LLAMA3)),
    )


SCALINGS = (
    LLAMA3,
    LinearScaling(factor=3.0),
    DynamicScaling(factor=2.0, original_max_context=6),
    YarnScaling(factor=4.0, original_max_context=64, beta_fast=8.0),
    YarnScaling(factor=8.0, original_max_context=32, attention_factor=1.1, beta_fast=4.0, beta_slow=0.5, truncate=False),
)


@st.composite
def some_experts(draw, n_layers, shared):
    """Every gate, with and without shared experts and dense layers."""
    gate = draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid"]))
    n_groups, size = draw(st.sampled_from([(1, 1), (1, 3), (1, 5)] + [(2, 2), (3, 2)] * (gate == "sigmoid")))
    n_groups_active = draw(st.integers(1, n_groups))
    return Experts(
        n_experts=n_groups * size,
        n_active=draw(st.integers(1, n_groups_active * size)),
        d_ff=draw(st.integers(3, 6)),
        n_shared=draw(st.integers(0, 2)) if shared else 0,
        dense_layers=draw(st.sets(st.integers(0, n_layers - 1), max_size=2)),
        gate=gate,
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        n_groups=n_groups,
        n_groups_active=n_groups_active,
        router_bias=draw(st.booleans()),
    )


@st.composite
def positions_of(draw, head_dim, latent):
    """Settings of a config: how its attention knows positions."""
    if latent is None and draw(st.integers(0, 4)) == 0:
        return {"learned_positions": True, "max_context": 40}
    return {
        "rope_theta": draw(st.sampled_from([10000.0, 50.0])),
        "rope_scaling": draw(st.none() | st.sampled_from(SCALINGS)),
        "local_rope_theta": draw(st.none() | st.just(20.0)),
        "rotary_dim": None if latent else draw(st.none() | st.sampled_from(range(2, head_dim + 1, 2))),
    }


@st.composite
def any_config(draw):
    """Models with every mix of what `ModelConfig` has, wide enough that no norm magnifies rounding (see `configs`)."""
    n_layers, (n_kv_heads, group) = draw(st.integers(1, 3)), draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (1, 3)]))
    latent, attention, head_dim = None, {}, draw(st.sampled_from([4, 6, 8]))
    if draw(st.integers(0, 3)) == 0:
        rope_dim, q_rank = draw(st.sampled_from([2, 4])), draw(st.none() | st.integers(2, 6))
        latent = Latent(kv_rank=draw(st.integers(3, 6)), rope_dim=rope_dim, value_dim=draw(st.integers(3, 5)), q_rank=q_rank)
        head_dim, n_kv_heads, group = rope_dim + draw(st.integers(1, 3)), n_kv_heads * group, 1
    else:
        attention = {
            "qkv_bias": draw(st.booleans()),
            "qk_norm": draw(st.sampled_from([None, "head", "full"])),
            "attn_sinks": draw(st.booleans()),
        }
    pre_norm, post_norm = draw(st.sampled_from([(True, False), (True, False), (True, True), (False, True)]))
    experts = draw(st.none() | some_experts(n_layers, shared=not post_norm))
    acts = ["swiglu", "geglu", "clamped_swiglu"] + ["gelu"] * (experts is None)
    mlp_act = draw(st.sampled_from(acts))
    clamp = {"act_limit": 1.5, "act_alpha": 1.7} if mlp_act == "clamped_swiglu" else {}
    return ModelConfig(
        n_layers=n_layers,
        d_model=draw(st.integers(6, 10)),
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=draw(st.integers(3, 8)),
        vocab_size=draw(st.integers(2, 11)),
        tie_embeddings=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 6)),
        window_pattern=draw(st.sampled_from([(True,), (True, False), (False, True, True)])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        pre_norm=pre_norm,
        post_norm=post_norm,
        mlp_act=mlp_act,
        attn_scale=draw(st.none() | st.just(0.4)),
        attn_softcap=draw(st.none() | st.just(0.7)),
        final_softcap=draw(st.none() | st.just(1.5)),
        scale_embeddings=draw(st.booleans()),
        experts=experts,
        latent=latent,
        **draw(positions_of(head_dim, latent)),
        **attention,
        **clamp,
    )


@st.composite
def exceptions(draw, *names, n_layers=3):
    """Some tensors stored otherwise than the rest, in one layer or in all."""
    layers = st.none() | st.integers(0, n_layers - 1)
    some = st.tuples(st.sampled_from(names), layers, st.sampled_from([str(name) for name in FORMATS]))
    return tuple(draw(st.lists(some, max_size=4, unique_by=lambda each: each[:2])))


@st.composite
def precisions(draw, numeric=False):
    """Every allowed mix of formats, or of those that real arrays can be held in."""
    known = {**ALLOWED, **NUMERIC} if numeric else ALLOWED
    formats = {field: draw(st.sampled_from(names)) for field, names in known.items()}
    bits = None if numeric else draw(st.none() | st.sampled_from([0.5, 2.3, 4.83, 8, 16]))
    return Precision(**formats, bits_per_weight=bits)


def model_and_tensors(config, precision=FP32, seed=0, scale=1):
    """A random model, and the dict of the tensors it was made of."""
    tensors, draw = {}, random_source(seed)

    def source(name, layer, shape, expert=None):
        key = (name, layer) if expert is None else (name, layer, expert)
        tensors[key] = np.float32(scale) * draw(name, layer, shape, expert)
        return tensors[key]

    return Transformer(config, precision, source), tensors


def some_tokens(config, batch, n_new, seed=0):
    """Ids (batch, n_new), the same ones for the same arguments."""
    return np.random.default_rng(seed).integers(config.vocab_size, size=(batch, n_new))


def run(model, tokens, chunks, n_decoded=0, all_logits=False, cache=None):
    """Prefill the columns of `tokens` in chunks, then decode the `n_decoded` columns that are left.

    Returns
    -------
    ledger, cache, list of the logits of each forward
    """
    cache = model.new_cache(len(tokens)) if cache is None else cache
    logits, start = [], 0
    with npinfer.Ledger() as ledger:
        for n_new in chunks:
            logits.append(model.prefill(tokens[:, start : start + n_new], cache, all_logits=all_logits))
            start += n_new
        for column in range(start, start + n_decoded):
            logits.append(model.decode(tokens[:, column], cache))
    return ledger, cache, logits


def cached_rows(cache, layer):
    """Keys and values (batch, n_kv_heads, rows, head_dim), or latent rows, that the next query will see before its own."""
    probe = cache.fork()
    probe.capacity = None
    rows = [np.zeros((cache.batch, n_heads, 1, width), np.float32) for n_heads, width in cache.config.kv_pieces]
    return [visible[:, :, :-1] for visible in probe.append(layer, *rows)]
