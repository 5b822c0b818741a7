"""Closed forms for the bytes, FLOPs and seconds of inference.

    import costmodel, npinfer
    config = npinfer.preset("mistral-7b")
    costmodel.predict(config, npinfer.Precision(), "rtx-4090").floor.tpot_s

Read tensors, storage and sizes (what a model weighs), loads, forms, experts and
operations (counts as formulas), formulas (the public closed forms), profiles and
parallel (GPUs), levels and prediction (from counts to seconds), engines and
expected (what a real engine adds); then report (what a trace is made of),
traced and explain (formulas that print themselves), levers and advice (what to
change first), caching and replay (what reuse saves), line (what makes latency a
line, and where it bends), textbook (the chapter's claims, each computed),
published, measurements and validation (against measurements) and calibration
(engines fitted to them).
"""

from costmodel import formulas, line
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
    "line",
    "predict",
    "predict_from",
]
