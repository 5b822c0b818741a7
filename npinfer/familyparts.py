"""What families have of their own that data cannot say: functions that rows of `npinfer.families` name.

Each takes the keys that it needs and adds to the fields of the config; sizes,
options and the experts' numbers are there already.
"""

from npinfer.checks import flag, positive, whole
from npinfer.keys import rope, rope_settings, rope_settings_by_layer
from npinfer.scaling import yarn_attention_factor

# ---- positions


def one_rope(keys, fields):
    """One RoPE, the same in all layers."""
    fields["rope_theta"], fields["rope_scaling"] = rope(keys, rope_settings(keys), fields)


def partial_rope(keys, fields):
    """One RoPE on the first elements of a head; its stretchings are LongRoPE's, which is not run."""
    settings = rope_settings(keys)
    factor = positive("partial_rotary_factor", settings.pop("partial_rotary_factor", keys.take("partial_rotary_factor", 1.0)))
    if factor > 1:
        raise keys.error(f"partial_rotary_factor is {factor:g}, expected at most 1")
    if factor < 1:
        head_dim = whole("head_dim", fields.get("head_dim") or fields["d_model"] // fields["n_heads"])
        fields["rotary_dim"] = int(head_dim * factor)
    fields["rope_theta"], fields["rope_scaling"] = rope(keys, settings, fields, kinds=("default",))
    keys.take("original_max_position_embeddings")  # of LongRoPE only


def two_ropes(keys, fields):
    """One RoPE in the layers that see everything, and one that is not scaled in those with a window."""
    settings, local = rope_settings_by_layer(keys)
    fields["rope_theta"], fields["rope_scaling"] = rope(keys, settings, fields)
    fields["local_rope_theta"], _ = rope(keys, local, fields, "rope_local_base_freq", kinds=("default",))


# ---- windows


def windows_everywhere(keys, fields):
    fields["sliding_window"] = keys.take("sliding_window")


def windows_if_used(keys, fields):
    """A window of all layers, behind a switch."""
    window = keys.take("sliding_window")
    fields["sliding_window"] = window if flag("use_sliding_window", keys.take("use_sliding_window") or False) else None


def windows_above(keys, fields):
    """A window of the layers from max_window_layers on, behind a switch."""
    windows_if_used(keys, fields)
    first = whole("max_window_layers", keys.take("max_window_layers"), least=0)
    used = fields["sliding_window"] is not None
    _windows_by_layer(keys, fields, [used and layer >= first for layer in range(fields["n_layers"])])


def windows_but_each(keys, fields):
    """A window of all layers but each `sliding_window_pattern`-th."""
    windows_everywhere(keys, fields)
    period = whole("sliding_window_pattern", keys.take("sliding_window_pattern"))
    _windows_by_layer(keys, fields, [(layer + 1) % period != 0 for layer in range(fields["n_layers"])])


def _windows_by_layer(keys, fields, default):
    """The window's pattern, of `layer_types` where the file has it, as the shortest that repeats."""
    types = keys.take("layer_types")
    known = {"sliding_attention": True, "full_attention": False}
    if types is None:
        has = default
    elif isinstance(types, list) and len(types) == len(default) and all([kind in list(known) for kind in types]):
        has = [known[kind] for kind in types]
    else:
        raise keys.error(f"layer_types is {types!r:.60}, expected one of {', '.join(known)} for each of {len(default)} layers")
    if not any(has):
        fields["sliding_window"] = None
    elif fields["sliding_window"] is None:
        raise keys.error("layer_types has sliding_attention but there is no sliding_window, or use_sliding_window is false")
    else:
        text = bytes(has)
        period = next(period for period in range(1, len(text) + 1) if text.startswith(text[period:]))
        fields["window_pattern"] = tuple(has[:period])


# ---- attention and experts


def query_scale(keys, fields):
    """Scores divided by the root of a number of its own in place of head_dim."""
    scalar = positive("query_pre_attn_scalar", keys.take("query_pre_attn_scalar"))
    if scalar != fields.get("head_dim"):
        fields["attn_scale"] = scalar**-0.5


def latent(keys, fields):
    """Latent attention; what YaRN multiplies scores by is squared into their scale."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    nope, rope_dim, value_dim, kv_rank = [whole(name, keys.take(name)) for name in names]
    for name, size in (("head_dim", rope_dim), ("qk_head_dim", nope + rope_dim)):
        if keys.take(name, size) not in (None, size):
            raise keys.error(
                f"{name} is {keys.take(name)!r:.40}, expected {size} with qk_nope_head_dim {nope} and "
                f"qk_rope_head_dim {rope_dim}"
            )
    fields["head_dim"] = nope + rope_dim
    fields["latent"] = {"kv_rank": kv_rank, "rope_dim": rope_dim, "value_dim": value_dim, "q_rank": keys.take("q_lora_rank")}
    stretch, mscale = fields["rope_scaling"], rope_settings(keys).get("mscale_all_dim")
    if stretch and mscale:
        temperature = yarn_attention_factor(stretch.factor, mscale)
        fields["attn_scale"] = (nope + rope_dim) ** -0.5 * temperature * temperature
    flag("rope_interleave", keys.take("rope_interleave"))  # how weights are stored, for npinfer.checkpoint
    whole("num_nextn_predict_layers", keys.take("num_nextn_predict_layers"), least=0)


def first_dense(keys, fields):
    """Experts from layer first_k_dense_replace on."""
    n_dense = whole("first_k_dense_replace", keys.take("first_k_dense_replace"), least=0)
    fields["experts"]["dense_layers"] = range(min(n_dense, fields["n_layers"]))


def some_dense(keys, fields):
    """Experts in each decoder_sparse_step-th layer, but not in mlp_only_layers."""
    step, only = whole("decoder_sparse_step", keys.take("decoder_sparse_step")), keys.take("mlp_only_layers") or []
    if not isinstance(only, list):
        raise keys.error(f"mlp_only_layers is {only!r:.60}, expected a list of layers")
    only = {whole("mlp_only_layers", layer, least=0) for layer in only}
    fields["experts"]["dense_layers"] = [layer for layer in range(fields["n_layers"]) if layer in only or (layer + 1) % step]
