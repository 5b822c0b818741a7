"""Closed forms for the bytes, FLOPs and seconds of inference.

    import costmodel, npinfer
    config = npinfer.preset("mistral-7b")
    costmodel.predict(config, npinfer.Precision(), "rtx-4090").floor.tpot_s

Read loads and operations (counts as formulas), formulas (the public closed
forms), profiles (GPUs), engines (what a real engine adds),
prediction (from counts to seconds), expected (its calibrated level), then caching (what
reuse saves).
"""

from costmodel import formulas
from costmodel.caching import breakeven_prefix_tokens, cached_ttft_s
from costmodel.engines import Engine, engine
from costmodel.prediction import Prediction, predict, predict_from
from costmodel.profiles import GPU, ProfileError, gpu, gpus

__all__ = [
    "Engine",
    "GPU",
    "Prediction",
    "ProfileError",
    "breakeven_prefix_tokens",
    "cached_ttft_s",
    "engine",
    "formulas",
    "gpu",
    "gpus",
    "predict",
    "predict_from",
]
