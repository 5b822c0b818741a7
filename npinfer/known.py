"""Known models by name; their shapes are tables of presets.toml."""

import os

from npinfer import scaling
from npinfer.config import ModelConfig
from npinfer.parts import Experts, Latent
from npinfer.tables import read_table, table_names

PRESETS = os.path.join(os.path.dirname(__file__), "presets.toml")


def presets():
    """Names of the models that `preset` knows."""
    return table_names(PRESETS)


def preset(name):
    """The `ModelConfig` of a known model.

    Raises
    ------
    UnknownName
        If there is none of that name; the message lists those there are.
    """
    table = read_table(PRESETS, name, "model")
    del table["source"]
    table.pop("note", None)
    for part, kind in (("experts", Experts), ("latent", Latent)):
        if part in table:
            table[part] = kind(**table[part])
    if "rope_scaling" in table:
        table["rope_scaling"] = scaling.of_kind(**table["rope_scaling"])
    return ModelConfig(name=name, **table)
