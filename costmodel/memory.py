"""How much memory a numeric run holds at its peak: an estimate from the config, good to some 15 %."""

import os
from math import prod

import numpy as np

from costmodel import formulas
from costmodel.tensors import tensors
from npinfer import Precision
from npinfer.attention import BLOCK_ELEMENTS
from npinfer.formats import FORMATS
from npinfer.kvcache import GROWTH_ROWS
from npinfer.storage import packed
from npinfer.weights import THREADED_D_MODEL

PROGRAM_BYTES = 50_000_000  # Python and NumPy themselves
FP32 = Precision("fp32", "fp32", "fp32")
COPIES = {"fp32": 1, "fp16": 2.5, "bf16": 1.75}  # arrays as large as a matrix that rounding it takes; 3 for codes and scales


def numeric_memory_bytes(config, precision, batch, n_prompt, n_output, pack=False):
    """Bytes that a numeric run of random weights holds at its peak.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    batch, n_prompt, n_output : int
    pack : bool
        As for `npinfer.Transformer.random`.

    Returns
    -------
    int
        Weights and, beside them, the KV cache and the activations of the
        prefill, or what the last matrix is made from, or (before there are
        other weights) what the embedding is made from, whichever is most.
    """
    d, format_ = config.d_model, precision.matrices
    held = weight_array_bytes(config, precision, pack)
    table, copies = config.vocab_size * d, COPIES.get(format_, 3)
    tables = round(4 * copies * table) + (0 if config.tie_embeddings else _element_bytes(format_, pack) * table)
    widest = config.d_ff if config.experts is None else config.experts.d_ff
    joining = round(4 * copies * 2 * d * widest)  # gate and up
    if d >= THREADED_D_MODEL:
        joining *= min(os.cpu_count(), config.n_layers)
    kv = batch * (n_prompt + max(n_output, GROWTH_ROWS)) * formulas.kv_bytes_per_token(config, FP32)
    running = kv + 4 * _activations(config, batch, n_prompt, n_output)
    return max(held + max(joining, running), tables) + PROGRAM_BYTES


def weight_array_bytes(config, precision, pack=False):
    """Bytes of the arrays that a numeric model's weights are held in: float32, or packed."""
    total = 0
    for tensor in tensors(config).values():
        is_matrix = len(tensor.shape) == 2 and tensor.name != "positions"
        for format_, n_layers in tensor.formats(precision).items():
            element_bytes = _element_bytes(format_, pack and is_matrix)
            scales = 4 * FORMATS[format_].scales(tensor.shape) if is_matrix and format_ in FORMATS else 0
            total += n_layers * tensor.n_copies * (prod(tensor.shape) * element_bytes + scales)
    return total


def _element_bytes(format_, pack):
    return packed(np.zeros(1, np.float32), format_).itemsize if pack else 4


def _activations(config, batch, n_prompt, n_output):
    """Elements that a prefill, or a step, holds at once: those of attention or those of an MLP, beside the residual stream."""
    d, n_tokens, experts = config.d_model, batch * n_prompt, config.experts
    d_qkv = (config.n_heads + (0 if config.latent else 2 * config.n_kv_heads)) * config.head_dim
    attention = n_tokens * 2 * d_qkv + min(2 * BLOCK_ELEMENTS, batch * config.n_heads * n_prompt**2)
    if config.latent:  # keys of all positions, and the product that values and the rest of the keys are parts of
        expanded = config.n_heads * (2 * config.head_dim - config.rope_dim + config.value_dim)
        attention += batch * (n_prompt + n_output) * expanded
    n_parts = 2 + config.gated  # the projections, and what an activation makes of them
    mlp = n_tokens * n_parts * config.d_ff if any(not kind.sparse for kind in config.kinds) else 0
    if experts:
        of_one = experts.n_active * (d + n_parts * experts.d_ff) // experts.n_experts
        mlp = max(mlp, n_tokens * (experts.n_active * d + max(of_one, n_parts * experts.n_shared * experts.d_ff)))
    return n_tokens * 3 * d + max(attention, mlp) + batch * config.vocab_size
