"""Models with every mix of what the families have: against the reference, in parts, in every format, and what is counted."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import npinfer.layers
import reference
from npinfer import (
    CacheError, DynamicScaling, Experts, Latent, Ledger, ModelConfig, Precision, Transformer, YarnScaling, generate,
)  # fmt: skip
from npinfer.formats import NUMERIC
from npinfer.tensors import layer_tensors, model_tensors
from oracle import n_retained, stored, vectors_of
from strategies import FP32, any_config, batches, cached_rows, chunkings, model_and_tensors, precisions, run, some_tokens

SMALL = settings(max_examples=40)
LATENT = ModelConfig(  # of the DeepSeek kind
    n_layers=3, d_model=12, n_heads=3, d_ff=10, vocab_size=13, head_dim=9,
    latent=Latent(kv_rank=7, rope_dim=4, value_dim=6, q_rank=8),
    experts=Experts(
        n_experts=6, n_active=2, d_ff=5, n_shared=1, dense_layers=(0,), gate="sigmoid", scale=2.5, n_groups=3,
        n_groups_active=2,
    ),
    rope_scaling=YarnScaling(factor=4.0, original_max_context=4000, beta_fast=8.0), name="latent",
)  # fmt: skip
SPARSE = ModelConfig(  # of the GPT-OSS kind
    n_layers=3, d_model=12, n_heads=4, n_kv_heads=2, d_ff=10, vocab_size=13, head_dim=6, qkv_bias=True, o_bias=True,
    mlp_bias=True, sliding_window=3, window_pattern=(True, False), attn_sinks=True, mlp_act="clamped_swiglu",
    act_limit=1.5, act_alpha=1.7,
    experts=Experts(n_experts=5, n_active=2, d_ff=7, gate="topk_softmax", router_bias=True), name="sparse",
)  # fmt: skip
CAPPED = ModelConfig(  # of the Gemma kind
    n_layers=3, d_model=12, n_heads=4, n_kv_heads=2, d_ff=10, vocab_size=13, head_dim=6, tie_embeddings=True, mlp_act="geglu",
    sliding_window=4, window_pattern=(True, False), local_rope_theta=100.0, post_norm=True, qk_norm="head", attn_scale=0.3,
    attn_softcap=1.0, final_softcap=2.0, scale_embeddings=True, name="capped",
)  # fmt: skip
LEARNED = ModelConfig(  # of the GPT-2 kind
    n_layers=2, d_model=12, n_heads=3, d_ff=20, vocab_size=13, norm="layer", mlp_act="gelu", qkv_bias=True, o_bias=True,
    mlp_bias=True, learned_positions=True, max_context=30, tie_embeddings=True, name="learned",
)  # fmt: skip
PARTIAL = ModelConfig(
    n_layers=2, d_model=12, n_heads=3, n_kv_heads=1, d_ff=9, vocab_size=13, head_dim=8, rotary_dim=2, pre_norm=False,
    post_norm=True, qk_norm="full", norm="layer", name="partial",
)  # fmt: skip
FAMILIES = (LATENT, SPARSE, CAPPED, LEARNED, PARTIAL)
every_family = pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.name)


def close(actual, expected):
    # Two orders of summation differ by some 1e-6, and where a norm divides by little by ten times that.
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=3e-5)


def lengths_matter(config):
    """Whether angles depend on how long the text is."""
    return isinstance(config.rope_scaling, DynamicScaling) and not config.learned_positions


# ---- the equations


@SMALL
@given(any_config(), batches, st.integers(1, 9))
@example(LATENT, 2, 9)
@example(SPARSE, 2, 9)
@example(CAPPED, 2, 9)
@example(LEARNED, 2, 9)
@example(PARTIAL, 2, 9)
def test_logits_equal_the_reference(config, batch, n_tokens):
    model, tensors = model_and_tensors(config)
    tokens = some_tokens(config, batch, n_tokens)
    logits = model.prefill(tokens, model.new_cache(batch), all_logits=True)
    for row in range(batch):
        close(logits[row], reference.logits(tokens[row], tensors, config))


@SMALL
@given(any_config(), batches, chunkings, st.integers(0, 3))
def test_every_split_of_a_prompt_gives_its_logits(config, batch, chunks, n_decoded):
    """Under dynamic scaling a key keeps the angle of the text as long as it was, and the split shows."""
    model, tensors = model_and_tensors(config)
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    _, cache, logits = run(model, tokens, chunks, n_decoded, all_logits=True)
    forwards = [*chunks, *[1] * n_decoded]
    assert cache.length == sum(forwards)
    together = np.concatenate([part.reshape(batch, -1, config.vocab_size) for part in logits], axis=1)
    for row in range(batch):
        close(together[row], reference.logits(tokens[row], tensors, config, forwards))
    if not lengths_matter(config):
        close(together, model.prefill(tokens, model.new_cache(batch), all_logits=True))


def test_under_dynamic_scaling_a_forward_has_the_stretch_of_its_own_length():
    scaling = DynamicScaling(factor=4.0, original_max_context=6)
    config = ModelConfig(n_layers=1, d_model=12, n_heads=2, d_ff=8, vocab_size=13, rope_scaling=scaling)
    model, tensors = model_and_tensors(config)
    tokens = some_tokens(config, 1, 12)
    whole = model.prefill(tokens, model.new_cache(), all_logits=True)
    _, _, (first, last) = run(model, tokens, [6, 6], all_logits=True)
    close(whole[0], reference.logits(tokens[0], tensors, config))
    unscaled = replace(config, rope_scaling=None)
    close(first[0], reference.logits(tokens[0, :6], tensors, unscaled))  # up to the trained length nothing is stretched
    close(last[0], reference.logits(tokens[0], tensors, config, [6, 6])[6:])
    assert np.abs(last - whole[:, 6:]).max() > 1e-2


@pytest.mark.parametrize("weights", [name for name in NUMERIC["weights"] if name != "fp32"])
@settings(max_examples=20)
@given(config=any_config(), seed=st.integers(0, 50))
@example(config=LATENT, seed=0)
@example(config=SPARSE, seed=0)
@example(config=LEARNED, seed=0)
def test_weights_are_rounded_to_their_format_and_computed_in_float32(weights, config, seed):
    model, tensors = model_and_tensors(config, Precision(weights=weights, kv="fp32"), seed)
    (tokens,) = some_tokens(config, 1, 5)
    logits = model.prefill(tokens, model.new_cache(), all_logits=True)
    close(logits[0], reference.logits(tokens, reference.stored(tensors, weights), config))


@every_family
@pytest.mark.parametrize("kv", ["fp32", "fp16", "bf16", "int8"])
def test_rows_of_the_cache_are_rounded_to_their_format(config, kv):
    """In the first layer, where nothing that was rounded has come in yet, they are the reference's, rounded."""
    model, tensors = model_and_tensors(config, Precision(weights="fp32", kv=kv))
    (tokens,) = some_tokens(config, 1, 8)
    _, cache, _ = run(model, tokens[None], [5], 3)
    exact = reference.rows_of_first_layer(tokens, tensors, config)
    kept = n_retained(8, config.windows[0])
    for rows, expected in zip(cached_rows(cache, 0), exact, strict=True):
        expected = expected[:, 8 - kept :]
        if kv == "int8":
            codes, scales = rows[0, ..., :-1], rows[0, ..., -1:]
            assert np.array_equal(codes, np.rint(codes)) and np.all(np.abs(codes).max(axis=-1) == 127)
            assert np.array_equal(scales, reference.ROUND["fp16"](scales))
            # Half a code, and what the largest is off when its scale is rounded to fp16.
            assert np.all(np.abs(codes * scales - expected) <= scales * (0.5 + 127 * 2**-11) + 1e-6)
        else:
            relative = {"fp32": 2**-18, "fp16": 2**-11, "bf16": 2**-8}[kv]
            assert np.array_equal(rows[0], reference.ROUND[kv](rows[0]))
            np.testing.assert_allclose(rows[0], expected, rtol=relative * 1.001, atol=1e-6)


@SMALL
@given(any_config(), st.integers(2, 3), chunkings, st.integers(0, 2))
def test_rows_of_a_batch_equal_solo_runs(config, batch, chunks, n_decoded):
    model = Transformer.random(config, precision=FP32)
    tokens = some_tokens(config, batch, sum(chunks) + n_decoded)
    _, _, together = run(model, tokens, chunks, n_decoded)
    for row in range(batch):
        _, _, alone = run(model, tokens[row : row + 1], chunks, n_decoded)
        close([logits[row] for logits in together], [logits[0] for logits in alone])


# Every field that changes what is computed, changed in a model that has what it is about.
DIFFERENT = [
    (SPARSE, "sliding_window", 5), (SPARSE, "window_pattern", (False, True)), (SPARSE, "rope_theta", 30.0),
    (SPARSE, "rope_scaling", DynamicScaling(factor=8.0, original_max_context=4)), (SPARSE, "norm_eps", 0.1),
    (SPARSE, "rotary_dim", 2), (SPARSE, "act_limit", 0.5), (SPARSE, "act_alpha", 0.5), (SPARSE, "attn_scale", 1.0),
    (SPARSE, "experts", Experts(n_experts=5, n_active=3, d_ff=7, gate="topk_softmax", router_bias=True)),
    (SPARSE, "experts", Experts(n_experts=5, n_active=2, d_ff=7, gate="softmax", renormalise=False, router_bias=True)),
    (LATENT, "experts", replace(LATENT.experts, scale=1.0)), (LATENT, "experts", replace(LATENT.experts, renormalise=False)),
    (LATENT, "experts", replace(LATENT.experts, n_groups_active=1)),
    (LATENT, "experts", replace(LATENT.experts, n_groups=1, n_groups_active=1)),
    (LATENT, "rope_scaling", None), (LATENT, "rope_scaling", replace(LATENT.rope_scaling, truncate=False)),
    (LATENT, "rope_scaling", replace(LATENT.rope_scaling, attention_factor=1.5)), (LATENT, "sliding_window", 2),
    (CAPPED, "local_rope_theta", None), (CAPPED, "attn_softcap", None), (CAPPED, "final_softcap", 1.0),
    (CAPPED, "attn_softcap", 0.2), (CAPPED, "scale_embeddings", False), (CAPPED, "mlp_act", "swiglu"),
]  # fmt: skip


@pytest.mark.parametrize("config, field, value", DIFFERENT, ids=[f"{config.name}-{field}" for config, field, _ in DIFFERENT])
def test_every_setting_shows_in_the_logits(config, field, value):
    """The tensors are the same; what is done with them is not."""
    _, tensors = model_and_tensors(config)

    def source(name, layer, shape, expert=None):
        return tensors[(name, layer) if expert is None else (name, layer, expert)]

    tokens = some_tokens(config, 1, 9)
    logits = []
    for each in (config, replace(config, **{field: value})):
        model = Transformer(each, FP32, source)
        logits.append(model.prefill(tokens, model.new_cache(), all_logits=True))
    close(logits[1][0], reference.logits(tokens[0], tensors, replace(config, **{field: value})))
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


# ---- what is counted


@SMALL
@given(any_config(), precisions(numeric=True), batches, chunkings, st.integers(0, 2), st.booleans())
@example(SPARSE, Precision("int4", "int8"), 2, [3, 2], 1, False)
@example(LATENT, Precision("int8", "int8"), 2, [3, 2], 1, False)
def test_numeric_and_shape_only_runs_differ_in_the_experts_read_alone(config, precision, batch, chunks, n_decoded, all_logits):
    observed = []

    def watched(ids, count=npinfer.layers.n_touched):
        observed.append((len(ids), count(ids)))
        assert observed[-1][1] == len({int(expert) for expert in ids.ravel()})
        return observed[-1][1]

    request = some_tokens(config, batch, sum(chunks) + n_decoded), chunks, n_decoded, all_logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npinfer.layers, "n_touched", watched)
        numeric, *_ = run(Transformer.random(config, precision=precision), *request)
    shapes, *_ = run(Transformer.shape_only(config, precision), *request)
    all_read, *_ = run(Transformer.shape_only(config, precision, experts="all"), *request)
    keys = "phase", "forward", "op"
    if config.experts is None:
        assert not observed and numeric.by(*keys) == shapes.by(*keys) == all_read.by(*keys)
        return
    experts, names = config.experts, ("gate_proj", "up_proj", "down_proj")
    n_sparse = sum([kind.sparse for kind in config.kinds])
    assert len(observed) == n_sparse * len(numeric.forwards)
    for name in names:
        d_out, d_in = (config.d_model, experts.d_ff) if name == "down_proj" else (experts.d_ff, config.d_model)
        one = stored((d_out, d_in), precision.weights)
        one += stored((d_out,), vectors_of(precision.weights)) if config.mlp_bias else 0
        counts, most = numeric.total(op=name), all_read.total(op=name)
        n_unread = sum([experts.n_experts - touched for _, touched in observed])
        assert most.weight_bytes_read - counts.weight_bytes_read == n_unread * one
        widened = d_out * d_in if precision.weights == "int4" else 0
        assert most.elementwise_flops - counts.elementwise_flops == n_unread * widened
    for ledger in (shapes, all_read):
        assert alike(ledger.by(*keys), names, precision) == alike(numeric.by(*keys), names, precision)


def alike(grouped, names, precision):
    """Counts with what depends on the experts touched left out."""
    without = {"weight_bytes_read": 0} | ({"elementwise_flops": 0} if precision.weights == "int4" else {})
    return {key: (n, counts._replace(**without) if key[2] in names else counts) for key, (n, counts) in grouped.items()}


@SMALL
@given(any_config(), precisions(), batches, chunkings, st.integers(0, 2))
def test_every_layer_reads_the_keys_that_its_window_shows(config, precision, batch, chunks, n_decoded):
    forwards, n_past = [*chunks, *[1] * n_decoded], 0
    model, tokens = Transformer.shape_only(config, precision), some_tokens(config, batch, sum(forwards))
    ledger, cache, _ = run(model, tokens, chunks, n_decoded)
    n_parts, n_heads, width = config.kv_shape
    row = stored((batch * n_heads, width), precision.kv)
    read_by = ("kv_expand",) if config.latent else ("attn_scores", "attn_mix")
    windows = [config.sliding_window if has else None for has in (config.window_pattern * 3)[: config.n_layers]]
    for number, n_new in enumerate(forwards):
        for layer, window in enumerate(windows):
            n_rows = n_retained(n_past, window) + n_new
            for op in read_by:
                assert ledger.total(op=op, layer=layer, forward=number).kv_bytes_read == n_rows * row
            written = ledger.total(op="kv_append", layer=layer, forward=number)
            assert written.kv_bytes_written == n_parts * n_new * row
            scores = ledger.total(op="attn_scores", layer=layer, forward=number)
            assert scores.matmul_flops == 2 * batch * config.n_heads * n_new * n_rows * config.head_dim
        n_past += n_new
    assert cache.nbytes == n_parts * row * sum([n_retained(n_past, window) for window in windows])
    if not config.sliding_window:
        assert cache.nbytes == batch * n_past * model.kv_bytes_per_token


LAYER_ENTRIES = {
    "latent": (
        "attn_norm q_down q_norm q_up rope kv_down k_norm rope kv_append kv_expand attn_scores softmax attn_mix o_proj "
        "attn_residual mlp_norm router gate_proj up_proj mlp_act down_proj gate_proj up_proj mlp_act down_proj mlp_residual "
        "mlp_residual"
    ),
    "sparse": (
        "attn_norm q_proj k_proj v_proj rope rope kv_append attn_scores softmax attn_mix o_proj attn_residual mlp_norm router "
        "gate_proj up_proj mlp_act down_proj mlp_residual"
    ),
    "capped": (
        "attn_norm q_proj k_proj v_proj q_norm rope k_norm rope kv_append attn_scores softmax attn_mix o_proj post_attn_norm "
        "attn_residual mlp_norm gate_proj up_proj mlp_act down_proj post_mlp_norm mlp_residual"
    ),
    "learned": (
        "attn_norm q_proj k_proj v_proj kv_append attn_scores softmax attn_mix o_proj attn_residual mlp_norm up_proj mlp_act "
        "down_proj mlp_residual"
    ),
    "partial": (
        "q_proj k_proj v_proj q_norm rope k_norm rope kv_append attn_scores softmax attn_mix o_proj post_attn_norm "
        "attn_residual gate_proj up_proj mlp_act down_proj post_mlp_norm mlp_residual"
    ),
}


@every_family
@pytest.mark.parametrize("numeric", [True, False])
def test_entries_of_a_layer(config, numeric):
    model = (Transformer.random if numeric else Transformer.shape_only)(config, precision=FP32)
    with Ledger() as ledger:
        model.prefill(some_tokens(config, 1, 3), model.new_cache())
    entries = [entry.op for entry in ledger.entries() if entry.layers is not None and 1 in entry.layers]
    assert entries == LAYER_ENTRIES[config.name].split()
    assert [entry.op for entry in ledger.entries() if entry.layers is None] == ["embed", "final_norm", "lm_head"]


@SMALL
@given(any_config())
def test_a_source_is_asked_for_each_tensor_once_in_its_shape(config):
    asked = []

    def source(name, layer, shape, expert=None):
        asked.append((name, layer, expert, shape))
        return np.ones(shape, np.float32)

    Transformer(config, FP32, source)
    expected = [(name, None, None, shape) for name, shape in model_tensors(config).items()]
    per_expert = {"gate_proj", "up_proj", "down_proj", "gate_proj.bias", "up_proj.bias", "down_proj.bias"}
    for layer, kind in enumerate(config.kinds):
        for name, shape in layer_tensors(config, kind).items():
            if kind.sparse and name in per_expert:
                expected += [(name, layer, expert, shape[1:]) for expert in range(shape[0])]
            else:
                expected.append((name, layer, None, shape))
    assert sorted(asked, key=repr) == sorted(expected, key=repr)


# ---- positions that are learned have an end


@pytest.mark.parametrize("numeric", [True, False])
def test_positions_beyond_those_learned_are_refused(numeric):
    model = (Transformer.random if numeric else Transformer.shape_only)(LEARNED, precision=FP32)
    cache = model.new_cache()
    model.prefill(some_tokens(LEARNED, 1, 28), cache)
    with Ledger() as ledger, pytest.raises(CacheError, match="positions up to 31 are asked for, and the model has learned 30"):
        model.prefill([[1, 2, 3]], cache)
    assert cache.length == 28 and list(ledger.entries()) == []
    model.prefill([[1, 2]], cache)
    with pytest.raises(CacheError, match="positions up to 31"):
        model.decode([1], cache)
    with pytest.raises(CacheError, match="positions up to 31"):
        model.prefill(some_tokens(LEARNED, 1, 31), model.new_cache())
    assert generate(model, some_tokens(LEARNED, 1, 25), 6).cache.length == 30


# ---- models are told apart


SCALINGS_DIFFER = [
    replace(LATENT.rope_scaling, **change)
    for change in (
        {"factor": 5.0}, {"original_max_context": 5000}, {"beta_fast": 9.0}, {"beta_slow": 1.5}, {"truncate": False},
        {"attention_factor": 1.25},
    )
]  # fmt: skip
# In place of each field, another value that goes with the rest of its config.
CHANGED = {
    "n_layers": 4, "d_model": 14, "n_heads": 8, "d_ff": 11, "vocab_size": 14, "n_kv_heads": 1, "head_dim": 8,
    "tie_embeddings": True, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "sliding_window": 5, "rope_theta": 500.0,
    "rope_scaling": SCALINGS_DIFFER[0], "norm_eps": 1e-6, "max_context": 99, "eos_token_ids": (3,), "window_pattern": (True,),
    "rotary_dim": 4, "local_rope_theta": 77.0, "norm": "layer", "post_norm": True, "qk_norm": "head", "act_limit": 2.0,
    "act_alpha": 1.0, "attn_scale": 0.2, "attn_softcap": 9.0, "final_softcap": 9.0, "attn_sinks": False,
    "scale_embeddings": True, "experts": None,
}  # fmt: skip
TOGETHER = {
    "learned_positions": {"learned_positions": True, "max_context": 9},
    "pre_norm": {"pre_norm": False, "post_norm": True},
    "mlp_act": {"mlp_act": "geglu", "act_limit": None, "act_alpha": None},
    "latent": {"latent": LATENT.latent, "qkv_bias": False, "n_kv_heads": 4, "attn_sinks": False},
}


def test_a_fingerprint_differs_for_every_field():
    assert {field.name for field in fields(ModelConfig)} == CHANGED.keys() | TOGETHER.keys() | {"name"}
    configs = [SPARSE, *[replace(SPARSE, **{name: value}) for name, value in CHANGED.items()]]
    configs += [replace(SPARSE, **change) for change in TOGETHER.values()]
    configs += [replace(LATENT, rope_scaling=scaling) for scaling in SCALINGS_DIFFER]
    configs += [replace(SPARSE, experts=replace(SPARSE.experts, **change)) for change in (
        {"n_experts": 6}, {"n_active": 1}, {"d_ff": 8}, {"n_shared": 1}, {"dense_layers": (1,)}, {"gate": "softmax"},
        {"renormalise": False}, {"router_bias": False},
    )]  # fmt: skip
    sigmoid = LATENT.experts
    configs += [LATENT, *[replace(LATENT, experts=replace(sigmoid, **change)) for change in (
        {"scale": 1.5}, {"n_groups": 1, "n_groups_active": 1}, {"n_groups_active": 3},
    )]]  # fmt: skip
    configs += [replace(LATENT, latent=replace(LATENT.latent, **change)) for change in (
        {"kv_rank": 6}, {"rope_dim": 2}, {"value_dim": 5}, {"q_rank": None}, {"q_rank": 7},
    )]  # fmt: skip
    models = [Transformer.shape_only(config, FP32) for config in configs]
    models += [Transformer.shape_only(SPARSE, Precision("fp32", "fp32", "fp32", exceptions=[exception])) for exception in (
        ("q_proj", None, "fp16"), ("q_proj", 1, "fp16"), ("q_proj", None, "bf16"), ("k_proj", None, "fp16"),
    )]  # fmt: skip
    assert len({model.fingerprint() for model in models}) == len(models)


@every_family
def test_a_fingerprint_differs_for_every_tensor(config):
    """One value of one tensor more, wherever it stands: also a sink, a correction, one expert's bias."""
    _, tensors = model_and_tensors(config)
    fingerprints = []
    for changed in (None, *tensors):
        def source(name, layer, shape, expert=None):
            key = (name, layer) if expert is None else (name, layer, expert)
            values = tensors[key].copy()
            if key == changed:
                values.flat[-1] += 1
            return values

        fingerprints.append(Transformer(config, FP32, source).fingerprint())
    assert len(set(fingerprints)) == 1 + len(tensors)
