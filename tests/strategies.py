"""Small models and requests for property tests, and helpers that run them.

Sizes are tiny, so that a failure is readable; every one differs from what it
could be confused with (head_dim is not d_model / n_heads, d_ff no multiple of
anything), so that a formula with the wrong size in it shows.
"""

import numpy as np
from hypothesis import strategies as st

import npinfer
from npinfer import ModelConfig, Precision, RopeScaling
from npinfer.formats import ALLOWED, NUMERIC

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
