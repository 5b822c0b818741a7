"""A decoder-only transformer in plain NumPy that counts every byte and every FLOP.

    import npinfer
    model = npinfer.Transformer.shape_only(npinfer.preset("mistral-7b"))
    with npinfer.Ledger() as ledger:
        npinfer.generate(model, tokens, n_output=100)
    ledger.total(phase="decode").weight_bytes_read

Read config (what a model is), ledger (what is counted), ops (each operation
and its cost), model (the equations), kvcache and generate, in this order; then
blocks and reuse (what the caches share), caches and sessions.
"""

from npinfer.caches import PrefixCache, PromptCache
from npinfer.config import ModelConfig, RopeScaling, preset, presets
from npinfer.errors import CacheError, CheckpointError, ConfigError, InputError, ShapeError, UnknownName
from npinfer.formats import Precision
from npinfer.generate import generate
from npinfer.kvcache import KVCache
from npinfer.ledger import Counts, Ledger
from npinfer.model import Transformer
from npinfer.reports import CachedStart
from npinfer.sessions import SessionCache

__all__ = [
    "CacheError",
    "CachedStart",
    "CheckpointError",
    "ConfigError",
    "Counts",
    "InputError",
    "KVCache",
    "Ledger",
    "ModelConfig",
    "Precision",
    "PrefixCache",
    "PromptCache",
    "RopeScaling",
    "SessionCache",
    "ShapeError",
    "Transformer",
    "UnknownName",
    "generate",
    "preset",
    "presets",
]
