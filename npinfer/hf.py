"""From a published config.json to a `ModelConfig`: the one place that knows both vocabularies.

A key is translated, or known to change nothing, or refused by name: a setting
that this package does not run must never be ignored.  What a family has of its
own is a row of `FAMILIES`.

Source of names and defaults: the configuration classes of github.com/huggingface/transformers,
src/transformers/models/<family>/configuration_<family>.py.
"""

import json
import os
from typing import NamedTuple

from npinfer.config import ModelConfig
from npinfer.scaling import RopeScaling
from npinfer.errors import ConfigError

# Published key -> ours; the value is taken as it is.  Those that must be there, and those that may be null.
SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
}
OPTIONS = {
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_context",
}


class Family(NamedTuple):
    """What a model_type has of its own.

    Attributes
    ----------
    architecture : str
        Its class with a language-model head.
    flags : dict
        Published boolean -> the fields of ModelConfig that it sets.
    defaults : dict
        Published key -> its value where the file leaves it out.
    window_key : str or None
        Where its sliding window stands; null means none.
    """

    architecture: str
    flags: dict = {}
    defaults: dict = {}
    window_key: str | None = None


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        flags={"attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)},
        defaults={"rms_norm_eps": 1e-6},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        window_key="sliding_window",
    ),
}

ACTIVATIONS = ("silu", "swish")

# Settings of training, generation, bookkeeping and speed: none changes a logit.
NO_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path add_bos_token add_cross_attention add_eos_token architectures
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
    id2label ignore_index initializer_range is_decoder is_encoder_decoder is_llama_config label2id language
    length_penalty license max_length max_sequence_length max_window_layers min_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class tokenizer_model_max_length top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_flash_attn
    """.split()
)


def config_from_hf(source):
    """See `ModelConfig.from_hf`."""
    where, published = _read(source)
    known = ", ".join(FAMILIES)
    model_type = published.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"{where}: model_type is {model_type!r}, which is not supported; supported: {known}")
    family = FAMILIES[model_type]
    architectures = published.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ConfigError(f"{where}: architectures is {architectures}, expected {[family.architecture]} for {model_type}")
    try:
        return _translated(family, {**family.defaults, **published}, where)
    except ConfigError as error:
        raise ConfigError(error if str(error).startswith(where) else f"{where}: {error}") from None


def _read(source):
    """Where the config stands, for messages, and its keys."""
    if isinstance(source, dict):
        return "config", source
    path = os.fspath(source)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path, "rb") as file:
            published = json.loads(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a config.json or the folder that holds one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); download it again") from None
    if not isinstance(published, dict):
        raise ConfigError(f"{path}: holds {type(published).__name__}, expected a JSON object")
    return path, published


def _translated(family, published, where):
    fields = {}
    for key, name in SIZES.items():
        if published.get(key) is None:
            raise ConfigError(f"{where}: {key} is missing")
        fields[name] = published[key]
    for key, name in OPTIONS.items():
        if published.get(key) is not None:
            fields[name] = published[key]
    for key, names in family.flags.items():
        for name in names:
            fields[name] = published.get(key) or False
    if published.get("hidden_act", "silu") not in ACTIVATIONS:
        raise ConfigError(f"{where}: hidden_act is {published['hidden_act']!r}, supported: {', '.join(ACTIVATIONS)}")
    if family.window_key:
        fields["sliding_window"] = published[family.window_key]
    fields["rope_theta"], fields["rope_scaling"] = _rope(published, where)
    fields["eos_token_ids"] = _token_ids(published.get("eos_token_id"), where)

    rope_keys = {"rope_theta", "rope_scaling", "rope_parameters"}
    handled = {*SIZES, *OPTIONS, *family.flags, family.window_key, "hidden_act", "eos_token_id", *rope_keys}
    for key, value in published.items():
        # Null, false and empty are how these files say that something is not there.
        if key not in handled and key not in NO_EFFECT and value not in (None, False, [], {}, ""):
            raise ConfigError(
                f"{where}: the key {key!r} ({str(value)[:60]}) is not one this package runs for "
                f"{published['model_type']}, and it may change the result"
            )
    name = published.get("_name_or_path") or os.path.basename(os.path.dirname(os.path.abspath(where)))
    return ModelConfig(**fields, name=str(name) if where != "config" else published["model_type"])


def _token_ids(value, where):
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"{where}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(ids)


def _rope(published, where):
    """rope_theta and the scaling, from the older keys or the newer `rope_parameters`."""
    older = published.get("rope_scaling") or {}
    newer = published.get("rope_parameters") or {}
    for key, table in (("rope_scaling", older), ("rope_parameters", newer)):
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {key} is {table!r}, expected an object or null")
    for key in older.keys() & newer.keys():
        if older[key] != newer[key]:
            raise ConfigError(f"{where}: {key} is {older[key]!r} in rope_scaling and {newer[key]!r} in rope_parameters; which one?")
    settings = {**older, **newer}
    theta = settings.pop("rope_theta", published.get("rope_theta", 10000.0))
    if published.get("rope_theta", theta) != theta:
        raise ConfigError(f"{where}: rope_theta is {published['rope_theta']} and in rope_parameters {theta}; which one?")
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    if kind == "llama3":
        return theta, _llama3_scaling(settings, where)
    if kind != "default":
        raise ConfigError(f"{where}: rope type is {kind!r}, which is not supported; supported: default, llama3")
    if extra := [key for key, value in settings.items() if value not in (None, 1.0)]:
        raise ConfigError(f"{where}: rope type is 'default' but has {', '.join(extra)}, which would change the result")
    return theta, None


def _llama3_scaling(settings, where):
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_context",
    }
    if settings.keys() != names.keys():
        differing = ", ".join(sorted(settings.keys() ^ names.keys()))
        raise ConfigError(f"{where}: rope type llama3 takes exactly {', '.join(names)}; missing or unknown: {differing}")
    return RopeScaling(**{name: settings[key] for key, name in names.items()})
