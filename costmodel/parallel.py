"""Tensor parallelism: one request on several equal devices.

Every device holds 1/n of each matrix and of the KV heads, so that together they
act as one with n times the rates; after attention and after the MLP they add
up their partial sums.  Below one KV head a device, keys and values would be
copied: left out, as are the embedding's and the head's own exchanges (two a forward).

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.
"""

from dataclasses import replace

from npinfer.config import whole
from npinfer.errors import InputError

_SHARED = ("memory_bytes", "memory_bytes_per_s", "vector_flops_per_s", "last_level_cache_bytes")


def together(gpu, n_gpus, config):
    """`n_gpus` devices as one: `gpu` itself for 1.

    Raises
    ------
    InputError
        If the heads cannot be shared out evenly.
    """
    if whole("n_gpus", n_gpus) == 1:
        return gpu
    if config.n_heads % n_gpus:
        raise InputError(f"n_gpus is {n_gpus}, expected a divisor of the {config.n_heads} heads, which are shared out evenly")
    rates = {name: rate * n_gpus for name, rate in gpu.matmul_flops_per_s.items()}
    values = {name: getattr(gpu, name) for name in _SHARED}
    return replace(gpu, matmul_flops_per_s=rates, **{name: value and value * n_gpus for name, value in values.items()})


def all_reduce_s(config, precision, gpu, n_gpus, n_tokens):
    """Seconds of adding up partial sums, twice a layer, in a ring: each device sends 2 (n - 1) / n of them.

    None if the profile lacks interconnect_bytes_per_s.
    """
    if n_gpus == 1:
        return 0.0
    if gpu.interconnect_bytes_per_s is None:
        return None
    nbytes = 2 * config.n_layers * n_tokens * config.d_model * precision.activations.bits / 8
    return nbytes * 2 * (n_gpus - 1) / n_gpus / gpu.interconnect_bytes_per_s
