"""The expected level: what an engine needs on a device, the sum of physical times.

    bytes moved / bandwidth, matrix products / their rates, layers * launches, and
    the scores of attention that is not fused, each times a parameter of the engine

Read `amounts` (what a phase has of each), `seconds`, then `level`.  The same
amounts are what `costmodel.calibration` fits the parameters to.
"""

from math import ceil
from typing import NamedTuple

from costmodel import experts, formulas, interpreter
from costmodel.engines import parameter
from costmodel.levels import times
from costmodel.loads import forward_load, layers_by_window, visible_pairs
from costmodel.operations import operation_counts

WIDENED_BYTES = 4  # of one weight: written as fp16, and read again
LEAST_BITS = 15  # of a weight on average: with fewer, most matrices are quantised
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


class Model(NamedTuple):
    """What the times depend on of a model and its formats alone.

    `dense_bytes` are those of the weights that every token uses, `active_bytes` those of one token's experts.
    """

    n_layers: int
    n_sparse: int
    used_share: float  # of a layer's experts, by one token
    dense_bytes: int
    active_bytes: int
    n_weights: int
    quantised: bool
    heads: list  # (window, heads of all layers that have it)
    n_operations: int  # of one forward
    n_products: int  # of them those with weights


class Work(NamedTuple):
    """What the times of a phase depend on, beside the device and the engine."""

    model: Model
    n_forwards: int
    n_tokens: int  # of one forward, all sequences
    needed_flops: int
    streamed_bytes: int
    activation_bytes: int
    expert_bytes: int  # of one forward, those that its tokens are expected to touch
    pairs: int  # (query, key) pairs needed, of all heads, layers and forwards
    decode: bool
    elementwise_flops: int
    n_cached: int  # positions before the first new one
    n_new: int


def model(config, precision, resident_bytes, streamed_bytes, n_weights):
    """`Model` of a config and its formats, whose weights take so many bytes, those of one token and parameters."""
    active = experts.active_bytes(config, precision) if config.experts else 0
    return Model(
        config.n_layers,
        sum([kind.sparse for kind in config.kinds]),
        config.experts.n_active / config.experts.n_experts if config.experts else 1.0,
        streamed_bytes - active,
        active,
        n_weights,
        8 * resident_bytes < LEAST_BITS * formulas.n_parameters(config),
        [(window, config.n_heads * len(layers)) for window, layers in layers_by_window(config)],
        *n_operations(config, precision),
    )


def n_operations(config, precision):
    """Operations of one forward, and how many of them are products with weights: in every layer (one `rope` on queries and
    one on keys), and outside them."""
    counted = operation_counts(config, precision, forward_load(config, precision, 1, 0, 1))
    products = {op for op, counts in counted.items() if counts.matmul_flops and counts.weight_bytes_read}
    inside = len(counted) - len(counted.keys() & {"embed", "final_norm", "lm_head"})
    n_all = config.n_layers * (inside + ("rope" in counted)) + len(counted) - inside + 1  # and `sample`
    of_layers = config.n_layers * (len(products) - 1)
    if config.experts:  # one token's experts each have theirs
        n_more = config.experts.n_active + (config.experts.n_shared > 0) - 1
        of_layers += sum([kind.sparse for kind in config.kinds]) * n_more * len(products & {"gate_proj", "up_proj", "down_proj"})
    return n_all, of_layers + 1


def work(model, phase, batch, n_cached, n_new, decode):
    """`Work` of a phase of `costmodel.levels`: `n_new` positions of `batch` sequences behind `n_cached`."""
    return Work(
        model,
        phase.n_forwards,
        batch * (1 if decode else n_new),
        phase.needed_flops,
        phase.streamed_bytes,
        sum([cost[3] for cost in phase.costs]) - phase.streamed_bytes,
        (phase.streamed_bytes - phase.least_bytes) // phase.n_forwards + model.active_bytes,
        batch * sum([n_heads * visible_pairs(n_cached, n_new, window) for window, n_heads in model.heads]),
        decode,
        sum([cost[1] for cost in phase.costs]),
        n_cached,
        n_new,
    )


def has_matrix_units(gpu):
    """Whether any known rate of the device is one of matrix units."""
    return not gpu.matmul_flops_per_s.keys() <= MATRIX_FREE


def amounts(engine, gpu, compute, work):
    """What a phase has of what each parameter is per.

    Returns
    -------
    list of (str, float or None)
        Parameter name, and seconds (of one second each) or a count; None where the
        device's rate for it is unknown.
    """
    model, bandwidth, forwards = work.model, gpu.memory_bytes_per_s, work.n_forwards
    pieces = -(-work.n_tokens // (engine.micro_batch_tokens or work.n_tokens))
    tiled = engine.tile_tokens if compute == "int8" else None
    moved = work.streamed_bytes + work.activation_bytes
    for nbytes, n_tokens in ((model.dense_bytes, work.n_tokens), (work.expert_bytes, work.n_tokens * model.used_share)):
        again = max(pieces, ceil(n_tokens / tiled)) - 1 if tiled else pieces - 1
        moved += forwards * again * nbytes
    products = work.n_tokens > 1  # the arithmetic of one token hides behind its weights
    if products and engine.widens and model.quantised and compute != "int8" and has_matrix_units(gpu):
        moved += forwards * pieces * WIDENED_BYTES * model.n_weights
    found = [(_stream(engine, gpu, work), moved / bandwidth)]
    found += [(name, model.n_layers * forwards * pieces) for name in engine.layer]
    if model.n_sparse:
        found += [(name, model.n_sparse * forwards * pieces) for name in engine.sparse_layer]
    if not work.decode:
        found += [(name, forwards) for name in engine.request]
    if products:
        for name in _products(engine, gpu, compute):
            per_s = gpu.vector_flops_per_s if parameter(name).per == "vector" else gpu.matmul_flops_per_s.get(compute)
            found.append((name, work.needed_flops / per_s if per_s else None))
    if engine.unfused:
        one_by_one = work.decode
        found.append((engine.score, work.pairs) if one_by_one else (engine.score_byte, work.pairs / bandwidth))
    return found


def _stream(engine, gpu, work):
    early = gpu.architecture.startswith(("Pascal", "Turing"))
    slow = "HBM" in gpu.memory_kind or (work.model.quantised and early)
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
    "request": "launches",
}


def seconds(engine, gpu, compute, work):
    """Expected seconds of a phase, and what most of them go to; None where a rate is missing."""
    shares = {"bandwidth": 0.0, "compute": 0.0, "launches": 0.0}
    for name, amount in amounts(engine, gpu, compute, work):
        if amount is None:
            return None, None
        each = parameter(name)
        shares[_BOUNDS[each.per]] += each.value * amount
    return sum(shares.values()), max(shares, key=shares.get)


def level(engine, gpu, compute, works, roofline, exchange_s, n_output):
    """The `Expected` of both phases: of an engine on a GPU never below the roofline, where that is known.

    Parameters
    ----------
    works : (Work, Work or None)
    roofline : Level
    exchange_s : (float, float)
        Seconds of each phase in which several devices add up their sums.
    """
    found = []
    for work, least_s, exchanging_s in zip(works, roofline, exchange_s):
        phase_s = bound = None
        if work and engine.interpreted:  # which skips scores that the roofline counts
            phase_s, bound = _interpreted(gpu, compute, work)
            phase_s = phase_s and phase_s / work.n_forwards
        elif work:
            phase_s, bound = seconds(engine, gpu, compute, work)
            phase_s = None if phase_s is None else max((phase_s + exchanging_s) / work.n_forwards, least_s or 0.0)
        found.append((phase_s, bound))
    (ttft_s, prefill_bound), (tpot_s, decode_bound) = found
    ranges = [s and low_high and (s * low_high[0], s * low_high[1]) for s, low_high in zip((ttft_s, tpot_s), engine.ranges)]
    return Expected(*times(ttft_s, tpot_s, n_output), prefill_bound, decode_bound, *ranges, engine.basis)


def _interpreted(gpu, compute, work):
    """As `seconds`, of `npinfer` itself."""
    peak = gpu.matmul_flops_per_s.get(compute)
    if None in (gpu.interpreter, gpu.vector_flops_per_s, peak):
        return None, None
    return interpreter.seconds(gpu, peak, work)
