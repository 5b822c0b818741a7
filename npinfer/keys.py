"""The keys of a published config.json: each is taken, or known to change nothing, or refused by its name.

`Keys` hands out values and notes which were asked for, so that what nobody
asked for can be refused; `rope` reads the settings of RoPE, which stand in
three different places.

Source of the names: github.com/huggingface/transformers, the classes in
src/transformers/models/<family>/configuration_<family>.py and modeling_rope_utils.py.
"""

from npinfer.checks import positive
from npinfer.errors import ConfigError
from npinfer.scaling import of_kind, yarn_attention_factor

# One setting under several names, by family and by age of the file.
SYNONYMS = {
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "rms_norm_eps": ("layer_norm_epsilon",),
    "hidden_act": ("hidden_activation", "activation_function"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "sliding_window": ("sliding_window_size",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}

# Settings of training, generation, bookkeeping and speed: none changes a logit.
NO_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path _num_labels add_bos_token
    add_eos_token
    architectures attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout id2label ignore_index initial_context_length initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id language length_penalty license max_length max_sequence_length max_window_layers min_length
    model_type n_special name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_router_logits output_scores pad_token_id
    predict_special_tokens prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class
    tokenizer_model_max_length top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attn
    """.split()
)

# What each kind of scaling must have, and what it may have.
_ORIGINAL = "original_max_position_embeddings"
_SCALINGS = {
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")),
}


class Keys:
    """The keys of a file.

    Parameters
    ----------
    published : dict
    defaults : dict
        Values of keys that the file leaves out; null in the file is no such key.
    where : str
        The file, for messages.
    """

    def __init__(self, published, defaults, where):
        self._published, self._defaults, self.where = published, defaults, where
        self._taken = set()

    def has(self, key):
        """Whether the file gives the key, under any of its names."""
        return any(name in self._published for name in (key, *SYNONYMS.get(key, ())))

    def take(self, key, default=None):
        """The value of a key; its synonyms must agree."""
        names = [name for name in (key, *SYNONYMS.get(key, ())) if name in self._published]
        self._taken.update(names)
        values = [(name, self._published[name]) for name in names if self._published[name] is not None]
        for name, value in values[1:]:
            if value != values[0][1]:
                raise self.error(f"{values[0][0]} is {values[0][1]!r:.40} and {name} {value!r:.40}; which one?")
        if values:
            return values[0][1]
        return None if names else self._defaults.get(key, default)

    def table(self, key):
        """The value of a key that is an object; {} for null."""
        value = self.take(key) or {}
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value!r:.60}, expected an object or null")
        return dict(value)

    def error(self, what):
        return ConfigError(f"{self.where}: {what}")

    def refuse_others(self):
        """Raise `ConfigError` for a key that was not taken and may change the result."""
        for key, value in self._published.items():
            # Null, false and empty are how these files say that something is not there.
            if key not in self._taken and key not in NO_EFFECT and value not in (None, False, [], {}, ""):
                raise self.error(
                    f"the key {key!r} ({str(value)[:60]}) is not one this package runs for "
                    f"{self._published['model_type']}, and it may change the result"
                )


def rope_settings(keys):
    """What the older `rope_scaling` and the newer `rope_parameters` say together, a dict."""
    newer = keys.table("rope_parameters")
    older = keys.table("rope_scaling") if keys.has("rope_scaling") or not newer else {}
    return _merged(keys, older, newer)


def rope_settings_by_layer(keys):
    """The same of a family with two RoPEs: of layers that see everything, and of those with a window."""
    newer = keys.table("rope_parameters")
    both = {kind: newer.pop(kind, None) or {} for kind in ("full_attention", "sliding_attention")}
    if newer or not all(isinstance(settings, dict) for settings in both.values()):
        raise keys.error("rope_parameters is expected to hold full_attention and sliding_attention here, objects both")
    return _merged(keys, keys.table("rope_scaling"), both["full_attention"]), dict(both["sliding_attention"])


def _merged(keys, older, newer):
    for key in older.keys() & newer.keys():
        if older[key] != newer[key]:
            raise keys.error(f"{key} is {older[key]!r} in rope_scaling and {newer[key]!r} in rope_parameters; which one?")
    return {**older, **newer}


def rope(keys, settings, fields, theta_key="rope_theta", kinds=("default", *_SCALINGS)):
    """(rope_theta, the scaling or None) of the settings of one RoPE, held to those of the file's own keys."""
    settings = dict(settings)
    outside = keys.take(theta_key, 10000.0)
    theta = settings.pop("rope_theta", outside)
    if keys.has(theta_key) and outside != theta:
        raise keys.error(f"{theta_key} is {outside} and in rope_parameters {theta}; which one?")
    named = [settings.pop(name) for name in ("rope_type", "type") if name in settings]
    kind = named[0] if named else "default"
    if not isinstance(kind, str) or kind not in kinds:
        raise keys.error(f"rope type is {kind!r:.40}, which is not supported; supported: {', '.join(kinds)}")
    if named[1:] not in ([], [kind]):
        raise keys.error(f"rope_type is {kind!r} and type {named[1]!r:.40}; which one?")
    if kind != "default":
        return theta, _scaling(keys, kind, settings, fields.get("max_context"))
    if extra := [key for key, value in settings.items() if value not in (None, 1.0)]:
        raise keys.error(f"rope type is 'default' but has {', '.join(extra)}, which would change the result")
    return theta, None


def _scaling(keys, kind, settings, max_context):
    """The record of `npinfer.scaling` of a kind's published settings."""
    must, may = _SCALINGS[kind]
    if differing := sorted({*must} - settings.keys() | settings.keys() - {*must, *may}):
        optional = f", optionally {', '.join(may)}" if may else ""
        raise keys.error(
            f"rope type {kind} takes exactly {', '.join(must)}{optional}; missing or unknown: {', '.join(differing)}"
        )
    settings = {key: value for key, value in settings.items() if key in must or value is not None}
    if kind in ("dynamic", "yarn"):
        settings.setdefault(_ORIGINAL, max_context)
    if _ORIGINAL in settings:
        settings["original_max_context"] = settings.pop(_ORIGINAL)
    mscales = [settings.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    mscales = [positive("rope_scaling mscale", mscale) for mscale in mscales if mscale]
    if "attention_factor" not in settings and len(mscales) == 2:
        factor = positive("rope_scaling factor", settings["factor"])
        above, below = [yarn_attention_factor(factor, mscale) for mscale in mscales]
        settings["attention_factor"] = above / below
    return of_kind(kind, **settings)
