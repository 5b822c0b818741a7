"""The expected level: what an engine needs on a device, the sum of physical times.

    bytes moved / bandwidth, matrix products / their rates, layers * launches, and
    the scores of attention that is not fused, each times a parameter of the engine

Read `amounts` (what a phase has of each), `seconds`, then `level`.  The same
amounts are what `costmodel.calibration` fits the parameters to.
"""

from typing import NamedTuple

from costmodel.engines import parameters
from costmodel.loads import visible_pairs

WIDENED_BYTES = 4  # of one weight: written as fp16, and read again
MATRIX_FREE = {"fp32", "int8"}  # rates that a device without matrix units can have


class Expected(NamedTuple):
    """The fields of a `Level`, and what they stand on.

    Attributes
    ----------
    ttft_range_s, tpot_range_s : (float, float) or None
        Within which 8 of 10 measurements of the calibration lie.
    prefill_bound, decode_bound : {"compute", "bandwidth", "launches"} or None
    basis : dict
        The engine, the rows it was calibrated on, their median error, the date.
    """

    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    latency_exact_s: float | None
    tokens_per_s: float | None
    prefill_bound: str | None
    decode_bound: str | None
    ttft_range_s: tuple | None
    tpot_range_s: tuple | None
    basis: dict


class Work(NamedTuple):
    """What the times of a phase depend on, beside the device and the engine."""

    n_forwards: int
    n_tokens: int  # of one forward, all sequences
    n_layers: int
    needed_flops: int
    streamed_bytes: int
    activation_bytes: int
    weight_bytes: int  # of one forward
    n_weights: int
    quantised: bool
    pairs: int  # (query, key) pairs needed, of all heads, layers and forwards
    decode: bool


def has_matrix_units(gpu):
    """Whether any known rate of the device is one of matrix units."""
    return not gpu.matmul_flops_per_s.keys() <= MATRIX_FREE


def needed_pairs(config):
    """A function of (n_cached, n_new): the (query, key) pairs of all heads and layers that the mask leaves of one sequence."""
    heads = [(window, config.n_heads * config.windows.count(window)) for window in dict.fromkeys(config.windows)]

    def pairs(n_cached, n_new):
        return sum([n_heads * visible_pairs(n_cached, n_new, window) for window, n_heads in heads])

    return pairs


def amounts(engine, gpu, compute, work):
    """What a phase has of what each parameter is per.

    Returns
    -------
    list of (str, float or None)
        Parameter name, and seconds (of one second each) or a count; None where the
        device's rate for it is unknown.
    """
    bandwidth, forwards = gpu.memory_bytes_per_s, work.n_forwards
    pieces = tiles = 1
    if engine.micro_batch_tokens:
        pieces = tiles = -(-work.n_tokens // engine.micro_batch_tokens)
    if engine.tile_tokens and compute == "int8":
        tiles = max(pieces, -(-work.n_tokens // engine.tile_tokens))
    moved = work.streamed_bytes + work.activation_bytes + forwards * (tiles - 1) * work.weight_bytes
    products = work.n_tokens > 1  # the arithmetic of one token hides behind its weights
    if products and engine.widens and work.quantised and compute != "int8" and has_matrix_units(gpu):
        moved += forwards * pieces * WIDENED_BYTES * work.n_weights
    found = [(_stream(engine, gpu, work), moved / bandwidth)]
    found += [(name, work.n_layers * forwards * pieces) for name in engine.layer]
    if not work.decode:
        found += [(name, work.n_layers * forwards) for name in engine.prefill_layer]
    if products:
        for name in _products(engine, gpu, compute):
            per_s = gpu.vector_flops_per_s if parameters()[name].per == "vector" else gpu.matmul_flops_per_s.get(compute)
            found.append((name, work.needed_flops / per_s if per_s else None))
    if engine.unfused:
        one_by_one = work.decode
        found.append((engine.score, work.pairs) if one_by_one else (engine.score_byte, work.pairs / bandwidth))
    return found


def _stream(engine, gpu, work):
    early = gpu.architecture.startswith(("Pascal", "Turing"))
    slow = "HBM" in gpu.memory_kind or (work.quantised and early)
    return engine.slow_stream if slow and engine.slow_stream else engine.stream


def _products(engine, gpu, compute):
    products = engine.products
    if "none" in products and not has_matrix_units(gpu):
        return products["none"]
    return products.get(compute) or products["any"]


_BOUNDS = {
    "stream": "bandwidth",
    "score_byte": "bandwidth",
    "matrix": "compute",
    "vector": "compute",
    "score": "compute",
    "layer": "launches",
}


def seconds(engine, gpu, compute, work):
    """Expected seconds of a phase, and what most of them go to; None where a rate is missing."""
    known = parameters()
    shares = {"bandwidth": 0.0, "compute": 0.0, "launches": 0.0}
    for name, amount in amounts(engine, gpu, compute, work):
        if amount is None:
            return None, None
        parameter = known[name]
        shares[_BOUNDS[parameter.per]] += parameter.value * amount
    return sum(shares.values()), max(shares, key=shares.get)


def times(ttft_s, tpot_s, n_output):
    """The five times of a level, None where they depend on one that is."""
    if ttft_s is None or tpot_s is None:
        return ttft_s, tpot_s, None, ttft_s if n_output == 1 else None, None
    latency_s = ttft_s + tpot_s * n_output  # as formulas.latency_s and its kin, whose checks take longer than they
    return ttft_s, tpot_s, latency_s, latency_s - tpot_s, n_output / latency_s


def level(engine, gpu, compute, works, roofline, exchange_s, n_output):
    """The `Expected` of both phases: never below the roofline, where that is known.

    Parameters
    ----------
    works : (Work, Work or None)
    roofline : Level
    exchange_s : (float, float)
        Seconds of each phase in which several devices add up their sums.
    """
    found = []
    for work, least_s, exchanging_s in zip(works, roofline, exchange_s):
        phase_s, bound = seconds(engine, gpu, compute, work) if work else (None, None)
        if phase_s is not None:
            phase_s = max((phase_s + exchanging_s) / work.n_forwards, least_s or 0.0)
        found.append((phase_s, bound))
    (ttft_s, prefill_bound), (tpot_s, decode_bound) = found
    ranges = [s and (s * low, s * high) for s, (low, high) in zip((ttft_s, tpot_s), engine.ranges)]
    return Expected(*times(ttft_s, tpot_s, n_output), prefill_bound, decode_bound, *ranges, engine.basis)
