"""From a published config.json to a `ModelConfig`: the one place that knows both vocabularies.

A key is translated, or known to change nothing, or refused by name: a setting
that this package does not run must never be ignored.  What a family has of its
own is a row of `npinfer.families.FAMILIES`.
"""

import json
import os
from typing import NamedTuple

from npinfer.checks import MAX_LAYERS, MAX_SIZE, whole
from npinfer.config import ModelConfig
from npinfer.errors import ConfigError
from npinfer.families import FAMILIES, Family
from npinfer.parts import Experts, Latent
from npinfer.keys import Keys

# Published key -> ours; the value is taken as it is.  Those that must be there, and those that may be null.
SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
}
OPTIONS = {
    "rms_norm_eps": "norm_eps",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_context",
}


class Published(NamedTuple):
    """A config, the row of its family, and the keys it was made of."""

    config: ModelConfig
    family: Family
    keys: Keys


def config_from_hf(source):
    """See `ModelConfig.from_hf`."""
    return read_config(source).config


def read_config(source):
    """The `Published` that a config.json holds; see `ModelConfig.from_hf`."""
    where, content = _read(source)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model_type is {model_type!r:.60}, which is not supported; supported: {known}")
    family = FAMILIES[model_type]
    architectures = content.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        expected = [family.architecture]
        raise ConfigError(f"{where}: architectures is {architectures!r:.60}, expected {expected} for {model_type}")
    keys = Keys(content, family.defaults, where)
    try:
        return Published(_translated(family, keys, _name(content, where)), family, keys)
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
            content = json.loads(file.read(), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a config.json or the folder that holds one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {type(content).__name__}, expected a JSON object")
    return path, content


def _unique(pairs):
    """The object of these keys and values; a key that is there twice may say two things."""
    content = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r:.60} appears twice")
        content[key] = value
    return content


def _name(content, where):
    if where == "config":
        return content["model_type"]
    folder, file = os.path.split(os.path.abspath(where))
    own = os.path.basename(folder) if file == "config.json" else os.path.splitext(file)[0]
    return str(content.get("_name_or_path") or own)


def _translated(family, keys, name):
    fields = dict(family.fields)
    _take_sizes(family, keys, fields)
    for key, field in {**OPTIONS, **family.options}.items():
        if (value := keys.take(key)) is not None:
            fields[field] = value
    for key, names in family.flags.items():
        fields |= dict.fromkeys(names, keys.take(key) or False)
    act = keys.take("hidden_act", "silu")
    if not isinstance(act, str) or act not in family.acts:
        raise keys.error(f"hidden_act is {act!r:.60}, supported: {', '.join(family.acts)}")
    fields["mlp_act"] = family.acts[act]
    for key, value in family.constants.items():
        if keys.take(key, value) != value:
            raise keys.error(f"the key {key!r} is {keys.take(key)!r:.60}, expected {value!r}: nothing else is run here")
    fields["eos_token_ids"] = _token_ids(keys)
    experts = {field: keys.take(key) for key, field in family.experts.items()}
    if experts:
        fields["experts"] = {**fields.get("experts", {}), **experts}
    for part in family.parts:
        part(keys, fields)
    keys.refuse_others()
    for part, kind in (("experts", Experts), ("latent", Latent)):
        if part in fields:
            fields[part] = kind(**fields[part])
    return ModelConfig(**fields, name=name)


def _take_sizes(family, keys, fields):
    for key, field in SIZES.items():
        size = keys.take(key)
        if size is None and key == "intermediate_size" and family.mlp_ratio:
            size = family.mlp_ratio * fields["d_model"]
        if size is None:
            raise keys.error(f"{key} is missing")
        fields[field] = whole(field, size, most=MAX_LAYERS if field == "n_layers" else MAX_SIZE)


def _token_ids(keys):
    value = keys.take("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise keys.error(f"eos_token_id is {value!r:.60}, expected a token id or a list of them")
    return tuple(ids)
