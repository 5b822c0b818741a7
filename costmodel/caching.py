"""What a cache of KV saves: counts and time to the first token, with and without it.

Cached rows on the device cost nothing to start from.  Rows in host memory
cross the host link first, and the prefill waits for them: no overlap is
assumed, so that what is said to pay does pay.
"""

import numpy as np

from costmodel import experts, formulas, loads, operations
from costmodel.arguments import whole_numbers
from costmodel.prediction import compute_format, predict
from costmodel.profiles import gpu as gpu_profile
from costmodel.search import first_where
from npinfer.checks import whole
from npinfer.errors import InputError, UnknownName
from npinfer.ledger import Counts

LEVELS = ("floor", "roofline", "expected")


def prefill_counts(config, precision, n_prompt, n_cached=0, batch=1):
    """Ten counts of a prefill that starts from `n_cached` rows: forward, sampling and the copying of those rows.

    Integers or integer arrays, as for `formulas.forward_counts`.
    """
    loaded = formulas.kv_bytes_held(config, precision, n_cached, batch)
    return (
        formulas.forward_counts(config, precision, batch, n_cached, n_prompt - n_cached)
        + formulas.sample_counts(config, precision, batch)
        + Counts(kv_bytes_read=loaded, kv_bytes_written=loaded)
    )


def transfer_s(config, precision, gpu, n_cached, batch=1, tier="device"):
    """Seconds that `n_cached` rows take to reach the device: 0 if they are there.

    Under a window only the rows still to be seen are moved.  None if they must
    cross the host link and the profile lacks its rate.
    """
    from npinfer.reuse import TIERS  # and with it all that caches need

    if tier not in TIERS:
        raise UnknownName("tier", tier, TIERS)
    if tier == "device":
        return 0.0
    rate = gpu_profile(gpu).host_link_bytes_per_s
    return None if rate is None else formulas.kv_bytes_held(config, precision, n_cached, batch) / rate


def cached_ttft_s(config, precision, gpu, n_prompt, n_cached, batch=1, tier="device", **device):
    """TTFT without and with a cache of the first `n_cached` tokens, by level.

    Parameters
    ----------
    device
        engine, n_gpus and compute of `predict`.

    Returns
    -------
    dict
        "floor", "roofline", "expected" -> {"cold": seconds, "warm": seconds},
        seconds None where a rate is missing.
    """
    moving_s = transfer_s(config, precision, gpu, n_cached, batch, tier)
    cold, warm = [
        predict(config, precision, gpu, n_prompt, n_output=1, batch=batch, n_cached=n, **device)
        for n in (0, n_cached)
    ]
    times = {}
    for level in LEVELS:
        before, after = getattr(cold, level).ttft_s, getattr(warm, level).ttft_s
        times[level] = {"cold": before, "warm": None if None in (after, moving_s) else moving_s + after}
    return times


def breakeven_prefix_tokens(config, precision, gpu, n_user, level="floor", batch=1, **device):
    """Length of a prefix from which loading its KV from host memory beats computing it again.

    Parameters
    ----------
    n_user : int
        Prompt tokens behind the prefix.
    level : {"floor", "roofline", "expected"}
    device
        engine, n_gpus and compute of `predict`.

    Returns
    -------
    int or None
        None if a rate is missing, or if no prefix up to 2**24 tokens is worth loading.

    Notes
    -----
    A short prompt waits for the weights whether its prefix is loaded or not, so
    that loading is a loss; computing costs more with every token, and its
    attention more than in proportion, so that there is one crossing.
    """
    if level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    n_user = whole_numbers("n_user", n_user, 1)
    gpu = gpu_profile(gpu)

    def gain_s(n_prefix):
        times = cached_ttft_s(config, precision, gpu, n_prefix + n_user, n_prefix, batch, "host", **device)[level]
        return None if None in times.values() else times["cold"] - times["warm"]

    if gain_s(1) is None:
        return None
    return first_where(lambda n_prefix: gain_s(n_prefix) > 0)


def prefill_times_s(config, precision, gpu, n_prompt, n_cached=0, batch=1, compute=None):
    """TTFT of many prompts at once, rows on the device: the floor and the roofline of `predict`, for arrays.

    Returns
    -------
    dict
        "floor", "roofline" -> float array of seconds; None without a matmul rate.
    """
    gpu = gpu_profile(gpu)
    peak = gpu.matmul_flops_per_s.get(compute_format(precision, compute))
    if peak is None:
        return {"floor": None, "roofline": None}

    formulas.forward_counts(config, precision, batch, n_cached, n_prompt - n_cached)  # refuses what is out of range
    load = loads.forward_load(config, precision, batch, n_cached, n_prompt - n_cached)
    by_op = [*operations.operation_counts(config, precision, load).values(), operations.sample_counts(config, precision, batch)]
    costs = [operations.Cost.of(counts) for counts in by_op]
    surplus = experts.surplus_bytes(config, precision, load)
    vector_peak = gpu.vector_flops_per_s or float("inf")
    floor = np.maximum(
        sum([cost.needed_flops for cost in costs]) / peak,
        (sum([cost.streamed_bytes for cost in costs]) - surplus) / gpu.memory_bytes_per_s,
    )
    each = [
        np.maximum(
            np.maximum(cost.needed_flops / peak, cost.elementwise_flops / vector_peak),
            cost.moved_bytes / gpu.memory_bytes_per_s,
        )
        for cost in costs
    ]
    return {"floor": floor, "roofline": np.maximum(floor, sum(each))}


def prefix_saving(config, precision, gpus, n_prompt, n_prefix, batch=1, **device):
    """A prompt whose first `n_prefix` tokens are cached, beside the same prompt without: the `prefix` of a trace.

    Raises
    ------
    InputError
        If the prefix is longer than the prompt.
    """
    n_prefix = whole_numbers("prefix tokens", n_prefix, 1)
    if n_prefix > n_prompt:
        raise InputError(f"prefix tokens is {n_prefix}, expected at most the prompt's {n_prompt}")
    n_cached = min(n_prefix, n_prompt - 1)  # the last token is computed for its logits
    cold = prefill_counts(config, precision, n_prompt, 0, batch)
    warm = prefill_counts(config, precision, n_prompt, n_cached, batch)
    return {
        "prefix_tokens": n_prefix,
        "n_computed": n_prompt - n_cached,
        "textbook_share": formulas.prefix_saving(n_prefix, n_prompt - n_prefix),
        "needed_flops_share": warm.needed_flops / cold.needed_flops,
        "cold": cold._asdict(),
        "warm": warm._asdict(),
        **_by_gpu(config, precision, gpus, n_prompt, n_cached, batch, device),
    }


def session_saving(config, precision, gpus, prompts, batch=1, **device):
    """A dialogue whose turns have prompts of these lengths, nothing generated between: the `session` of a trace.

    Each prompt continues the one before it, of which the session cache holds every row.
    """
    turns, held = [], 0
    for number, n_prompt in enumerate(prompts, start=1):
        n_prompt = whole(f"prompt of turn {number}", n_prompt)
        n_reused = min(held, n_prompt - 1)
        turns.append(
            {
                "turn": number,
                "prompt_tokens": n_prompt,
                "n_reused": n_reused,
                "n_computed": n_prompt - n_reused,
                "cold": prefill_counts(config, precision, n_prompt, 0, batch)._asdict(),
                "warm": prefill_counts(config, precision, n_prompt, n_reused, batch)._asdict(),
                **_by_gpu(config, precision, gpus, n_prompt, n_reused, batch, device),
            }
        )
        held = n_prompt
    return turns


def _by_gpu(config, precision, gpus, n_prompt, n_cached, batch, device):
    """TTFT of the first GPU, and of each by name."""
    times = {
        gpu.name: cached_ttft_s(config, precision, gpu, n_prompt, n_cached, batch, **device) for gpu in gpus
    }
    return {"ttft_s": times[gpus[0].name], "ttft_s_by_gpu": times}
