"""A decoder-only transformer in plain NumPy that counts every byte and every FLOP.

    import npinfer
    model = npinfer.Transformer.shape_only(npinfer.preset("mistral-7b"))
    with npinfer.Ledger() as ledger:
        npinfer.generate(model, tokens, n_output=100)
    ledger.total(phase="decode").weight_bytes_read

Read config (what a model is), ledger (what is counted), operation and ops (each
operation and its cost) with attention and experts, layers and model (the
equations), kvcache, generate and sampling; then families and hf (models from a
published config.json), checkpoint and gguf_model (their weights) and text (their
tokens); then blocks and reuse (what the caches share), caches, segments and
sessions.
"""

from npinfer.config import ModelConfig
from npinfer.errors import CacheError, CheckpointError, ConfigError, InputError, ShapeError, UnknownName
from npinfer.formats import Precision
from npinfer.generate import generate
from npinfer.known import preset, presets
from npinfer.kvcache import KVCache
from npinfer.ledger import Counts, Ledger
from npinfer.model import Transformer
from npinfer.parts import Experts, Latent
from npinfer.sampling import Sampler
from npinfer.scaling import DynamicScaling, LinearScaling, RopeScaling, YarnScaling

__all__ = [
    "CacheError",
    "CachedStart",
    "CheckpointError",
    "ConfigError",
    "Counts",
    "DynamicScaling",
    "Experts",
    "InputError",
    "KVCache",
    "Latent",
    "Ledger",
    "LinearScaling",
    "ModelConfig",
    "Precision",
    "PrefixCache",
    "PromptCache",
    "RopeScaling",
    "Sampler",
    "SessionCache",
    "ShapeError",
    "Transformer",
    "UnknownName",
    "YarnScaling",
    "generate",
    "preset",
    "presets",
]

# Loaded when first asked for: they bring threads and hashes, and a program without a cache need not wait for them.
_CACHES = {
    "CachedStart": "npinfer.reports",
    "PrefixCache": "npinfer.caches",
    "PromptCache": "npinfer.caches",
    "SessionCache": "npinfer.sessions",
}


def __getattr__(name):
    if name not in _CACHES:
        raise AttributeError(f"module 'npinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_CACHES[name]), name)
