"""Small models and requests for property tests, and helpers that run them.

Sizes are tiny, so that a failure is readable; every one differs from what it
could be confused with (head_dim is not d_model / n_heads, d_ff no multiple of
anything), so that a formula with the wrong size in it shows.
"""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import npinfer
from npinfer import Experts, Latent, ModelConfig, Precision, RopeScaling
from npinfer.formats import ALLOWED, FORMATS, NUMERIC

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


@st.composite
def experts(draw, n_layers):
    """Mixtures of up to 8 experts with every gate, in all layers or some."""
    gate = draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid"]))
    n_groups = draw(st.sampled_from([1, 2])) if gate == "sigmoid" else 1
    n_groups_active = draw(st.integers(1, n_groups))
    in_group = draw(st.integers(2, 4))
    return Experts(
        n_experts=n_groups * in_group,
        n_active=draw(st.integers(1, n_groups_active * in_group)),
        d_ff=draw(st.integers(1, 7)),
        n_shared=draw(st.integers(0, 2)),
        dense_layers=tuple(draw(st.sets(st.integers(0, n_layers - 1)))),
        gate=gate,
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])) if gate == "sigmoid" else 1.0,
        n_groups=n_groups,
        n_groups_active=n_groups_active,
        router_bias=draw(st.booleans()),
    )


@st.composite
def any_configs(draw):
    """Models with every mix of what the families have of their own, beside what `configs` gives."""
    base = draw(configs(windows=st.none() | st.integers(1, 6)))
    pre_norm, post_norm = draw(st.sampled_from([(True, False), (True, True), (False, True)]))
    mixture = draw(st.none() | experts(base.n_layers))
    if mixture and post_norm:
        mixture = replace(mixture, n_shared=0)
    acts = ["swiglu", "geglu", "clamped_swiglu"] if mixture else ["swiglu", "geglu", "gelu", "clamped_swiglu"]
    fields = {
        "window_pattern": draw(st.lists(st.booleans(), min_size=1, max_size=3).map(tuple)),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "mlp_act": draw(st.sampled_from(acts)),
        "attn_sinks": draw(st.booleans()),
        "attn_softcap": draw(st.none() | st.just(5.0)),
        "final_softcap": draw(st.none() | st.just(3.0)),
        "scale_embeddings": draw(st.booleans()),
        "experts": mixture,
        "pre_norm": pre_norm,
        "post_norm": post_norm,
    }
    if fields["mlp_act"] == "clamped_swiglu":
        fields |= {"act_limit": 7.0, "act_alpha": 1.702}
    if draw(st.booleans()):
        latent = Latent(
            kv_rank=draw(st.integers(2, 7)), rope_dim=2, value_dim=draw(st.integers(1, 5)),
            q_rank=draw(st.none() | st.integers(2, 5)),
        )
        fields |= {
            "latent": latent, "head_dim": draw(st.integers(3, 6)), "n_kv_heads": base.n_heads, "qkv_bias": False, "attn_sinks": False,
        }
    else:
        fields["qk_norm"] = draw(st.sampled_from([None, "head", "full"]))
        fields |= draw(
            st.sampled_from([{}, {"rotary_dim": 2}, {"learned_positions": True, "max_context": 64, "rope_scaling": None}])
        )
    return replace(base, **fields)


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
    """Keys and values (batch, n_kv_heads, rows, head_dim) that the next query will see before its own."""
    probe = cache.fork()
    probe.capacity = None
    row = np.zeros((cache.batch, cache.config.n_kv_heads, 1, cache.config.head_dim), np.float32)
    return [visible[:, :, :-1] for visible in probe.append(layer, row, row)]
