"""From counts to seconds: what a GPU needs at least, and what it may need.

Read `Phase` (the counts of prefill or decode, by operation), `floor_s` and
`roofline_s` (two ways from counts to time), then `predict`.

    floor      max(needed matmul FLOPs / peak, (weight + KV bytes) / bandwidth) of
               the whole phase: nothing that computes in the stated format beats it
    roofline   the sum over operations of max(needed matmul FLOPs / peak,
               elementwise FLOPs / vector peak, bytes without scores / bandwidth)
    expected   what an engine needs by its calibrated profile, see `costmodel.expected`

Source of the model: Williams, Waterman and Patterson 2009, "Roofline", CACM 52(4), 65-76.
"""

from functools import lru_cache, partial
from math import fsum
from typing import NamedTuple

from costmodel import engines, expected, formulas, loads, operations, parallel
from costmodel.profiles import COMPUTE_FORMATS
from costmodel.profiles import gpu as gpu_profile
from npinfer.errors import InputError, UnknownName

ETA = 0.6  # share of the peak in the rough estimates, the textbook's; section 9
CACHE_MARGIN = 4  # a step must stream this many times the last-level cache for its bandwidth floor to hold


class Level(NamedTuple):
    """One answer to how long it takes; None where a rate is missing or there is nothing to time.

    Attributes
    ----------
    ttft_s, tpot_s : float or None
    latency_s : float or None
        ttft + tpot * n_output, the textbook's line.
    latency_exact_s : float or None
        ttft + tpot * (n_output - 1): what the request takes.
    tokens_per_s : float or None
        n_output / latency_s, of one sequence.
    prefill_bound, decode_bound : {"compute", "bandwidth"} or None
    """

    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    latency_exact_s: float | None
    tokens_per_s: float | None
    prefill_bound: str | None
    decode_bound: str | None


class Rough(NamedTuple):
    """The textbook's estimates, 2 FLOPs a parameter and token at eta * peak, beside their error.

    Attributes
    ----------
    prefill_flops, decode_flops : int
        2*B*L*P and 2*B*C*P, P the streamed parameters.
    prefill_flops_error, decode_flops_error : float or None
        Relative to the exact needed FLOPs of the phase.
    tpot_compute_s, tpot_bandwidth_s, tpot_s : float or None
        From FLOPs, from weight bytes, and the larger of the two; None if there is no decode step.
    """

    eta: float
    n_params: int
    prefill_flops: int
    decode_flops: int
    prefill_flops_error: float
    decode_flops_error: float | None
    ttft_s: float | None
    tpot_s: float | None
    tpot_compute_s: float | None
    tpot_bandwidth_s: float | None


class Phase(NamedTuple):
    """Prefill or decode: the `Cost` of each operation, sampling included, its sums, and the number of forwards."""

    costs: list
    n_forwards: int
    needed_flops: int
    streamed_bytes: int

    @classmethod
    def of(cls, costs, n_forwards):
        return cls(costs, n_forwards, sum([cost[0] for cost in costs]), sum([cost[2] for cost in costs]))

    @property
    def intensity(self):
        """Needed matmul FLOPs for each byte of weights and KV moved; None for a phase without forwards."""
        return self.needed_flops / self.streamed_bytes if self.n_forwards else None


class Prediction(NamedTuple):
    """What `predict` returns: the same request at every level, and whether it fits.

    Attributes
    ----------
    gpu : GPU
    compute : str
        Format whose matmul rate is used.
    floor, roofline : Level
    expected : Expected
    engine : Engine
        Whose profile the expected level is calibrated by.
    n_gpus : int
        Devices that share the work; `gpu` is then all of them together.
    rough : Rough
    prefill, decode : Phase
    missing : tuple of str
        Rates that the profile lacks; their terms are left out.
    floor_applies : bool or None
        False where a decode step streams too little for the last-level cache
        to be ruled out as its source; None if the cache's size is unknown.
    ridge : float or None
        FLOPs per byte at which the device turns from bandwidth- to compute-bound.
    fits : bool
    memory_bytes_needed : int
        Weights and the KV of the whole request; activations are not in it.
    request : tuple
        (config, precision, batch).
    """

    gpu: object
    compute: str
    floor: Level
    roofline: Level
    expected: expected.Expected
    engine: object
    n_gpus: int
    rough: Rough
    prefill: Phase
    decode: Phase
    missing: tuple
    floor_applies: bool | None
    ridge: float | None
    fits: bool
    memory_bytes_needed: int
    request: tuple

    @property
    def max_context(self):
        """Longest context, in tokens of each sequence, whose KV fits beside the weights; None if any does."""
        config, precision, batch = self.request
        room = self.gpu.memory_bytes - formulas.weight_bytes(config, precision)
        longest, step = 0, 2**40
        if formulas.kv_bytes_held(config, precision, 2 * step, batch) <= room:
            return None  # every layer has a window
        while step and room >= 0:
            if formulas.kv_bytes_held(config, precision, longest + step, batch) <= room:
                longest += step
            step //= 2
        return longest


def predict(
    config, precision, gpu, n_prompt=1000, n_output=100, batch=1, n_cached=0, engine="generic", n_gpus=1, compute=None
):
    """Predict a request from closed forms.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    gpu : str, path or GPU
        As `costmodel.gpu` takes it.
    n_prompt : int
        Prompt tokens of each sequence, `n_cached` of them included.
    n_output : int
        Output tokens of each sequence; the first is the prefill's.
    batch : int
    n_cached : int
        Prompt tokens whose KV is already on the device, fewer than `n_prompt`.
    engine : str
        As `costmodel.engine` takes it.
    n_gpus : int
        Tensor-parallel devices.
    compute : str, optional
        Format whose matmul rate to use; default the one that the engine
        computes in, for most that of the activations.

    Returns
    -------
    Prediction

    Raises
    ------
    InputError
        If a number is out of range.
    UnknownName
        If there is no such GPU or compute format.
    """
    n_prompt = loads.whole_numbers("n_prompt", n_prompt, 1)
    n_cached = loads.whole_numbers("n_cached", n_cached, 0)
    n_steps = loads.whole_numbers("n_output", n_output, 1) - 1
    batch = loads.whole_numbers("batch", batch, 1)
    if n_cached >= n_prompt:
        raise InputError(f"n_cached is {n_cached} of n_prompt {n_prompt}; at least the last token is computed")
    row_bytes = partial(operations.stored_rows_bytes, precision, config.d_model)
    sample = _sizes(config, precision).sample
    load = loads.forward_load(config, row_bytes, batch, n_cached, n_prompt - n_cached)
    prefill = [*operations.operation_costs(config, precision, load), [number * batch for number in sample]]
    decode = []
    if n_steps:
        load = loads.decode_load(config, row_bytes, batch, n_prompt, n_steps)
        decode = [*operations.operation_costs(config, precision, load), [number * batch * n_steps for number in sample]]
    phases = Phase.of(prefill, 1), Phase.of(decode, n_steps)
    return _prediction(config, precision, gpu, *phases, n_prompt, n_output, batch, n_cached, engine, n_gpus, compute)


def predict_from(
    ledger, gpu, *, config, precision, n_prompt, n_output, batch=1, engine="generic", n_gpus=1, compute=None
):
    """The same prediction from a ledger of a run, numeric or shape-only.

    Parameters
    ----------
    ledger : npinfer.Ledger
        Of one `npinfer.generate` of this request.
    gpu, config, precision, n_prompt, n_output, batch, engine, n_gpus, compute
        As for `predict`.
    """
    forwards = ledger.forwards
    if [forwards.count("prefill"), forwards.count("decode")] != [1, n_output - 1] or len(forwards) != n_output:
        raise InputError(
            f"the ledger holds {forwards.count('prefill')} prefills and {forwards.count('decode')} decode steps, expected "
            f"1 and {n_output - 1} for n_output {n_output}; record one npinfer.generate"
        )
    costs = {"prefill": [], "decode": []}
    for (phase, op), (_, counts) in ledger.by("phase", "op").items():
        if op != "cache_load":  # the interpreter's own copy; a GPU attends to shared blocks in place
            costs[phase].append(operations.Cost.of(counts))
    phases = Phase.of(costs["prefill"], 1), Phase.of(costs["decode"], n_output - 1)
    return _prediction(config, precision, gpu, *phases, n_prompt, n_output, batch, 0, engine, n_gpus, compute)


def floor_s(phase, gpu, peak):
    """Seconds below which a phase cannot end, and what bounds it."""
    compute = phase.needed_flops / peak
    bandwidth = phase.streamed_bytes / gpu.memory_bytes_per_s
    return (compute, "compute") if compute > bandwidth else (bandwidth, "bandwidth")


def roofline_s(phase, gpu, peak):
    """Seconds of a phase whose operations run one after the other, each at its own bound; and what bounds most of it."""
    vector_peak, bytes_per_s = gpu.vector_flops_per_s or float("inf"), gpu.memory_bytes_per_s
    compute, bandwidth = [], []
    for needed_flops, elementwise_flops, _, moved_bytes in phase.costs:
        computing, moving = needed_flops / peak, moved_bytes / bytes_per_s
        if elementwise_flops / vector_peak > computing:
            computing = elementwise_flops / vector_peak
        if computing > moving:
            compute.append(computing)
        else:
            bandwidth.append(moving)
    total = fsum(compute + bandwidth)
    # A sum of maxima is never below the maximum of sums, but its rounding may be.
    return max(total, floor_s(phase, gpu, peak)[0]), "compute" if 2 * fsum(compute) > total else "bandwidth"


_kv_bytes_held = formulas.kv_bytes_held.__wrapped__  # the numbers are checked, and no arrays


class _Sizes(NamedTuple):
    """What a prediction takes from a model and its formats alone, worked once."""

    resident_bytes: int
    streamed_bytes: int
    n_params: int  # streamed
    quantised: bool
    needed_pairs: object  # a function, see `expected.needed_pairs`
    sample: operations.Cost  # of one sequence and forward


@lru_cache(maxsize=256)
def _sizes(config, precision):
    return _Sizes(
        formulas.weight_bytes(config, precision),
        formulas.weight_bytes(config, precision, streamed=True),
        formulas.n_streamed_parameters(config),
        precision.matrices.bits < 16,
        expected.needed_pairs(config),
        operations.Cost.of(operations.sample_counts(config, precision, 1)),
    )


def _level(seconds_of, prefill, decode, gpu, peak, n_output, exchange_s=(0.0, 0.0)):
    """A `Level` from a function of phase, GPU and matmul rate; and the seconds that devices exchange sums in."""
    ttft_s, prefill_bound = seconds_of(prefill, gpu, peak) if peak else (None, None)
    tpot_s = decode_bound = None
    if decode.n_forwards:
        # Without a matmul rate decode is still bound from below by what it streams.
        seconds, decode_bound = seconds_of(decode, gpu, peak or float("inf"))
        tpot_s = (seconds + exchange_s[1]) / decode.n_forwards
    return Level(*expected.times(ttft_s and ttft_s + exchange_s[0], tpot_s, n_output), prefill_bound, decode_bound)


def works(config, precision, prefill, decode, n_prompt, n_output, batch, n_cached):
    """What the expected times of both phases depend on: two `expected.Work`, the second None without decode steps."""
    _, weight_bytes, n_weights, quantised, pairs, _ = _sizes(config, precision)

    def work(phase, n_before, n_new, is_decode):
        return expected.Work(
            phase.n_forwards,
            batch * (1 if is_decode else n_new),
            config.n_layers,
            phase.needed_flops,
            phase.streamed_bytes,
            sum([cost[3] for cost in phase.costs]) - phase.streamed_bytes,
            weight_bytes,
            n_weights,
            quantised,
            batch * pairs(n_before, n_new),
            is_decode,
        )

    first = work(prefill, n_cached, n_prompt - n_cached, False)
    return first, work(decode, n_prompt, n_output - 1, True) if decode.n_forwards else None


def _rough(sizes, gpu, peak, prefill, decode, n_prompt, n_output, batch):
    n_params = sizes.n_params
    prefill_flops, decode_flops = 2 * batch * n_prompt * n_params, 2 * batch * n_output * n_params
    bandwidth_s = sizes.streamed_bytes / gpu.memory_bytes_per_s
    effective = ETA * peak if peak else None
    compute_s = decode_flops / n_output / effective if peak else None
    steps = decode.n_forwards > 0
    return Rough(
        eta=ETA,
        n_params=n_params,
        prefill_flops=prefill_flops,
        decode_flops=decode_flops,
        prefill_flops_error=prefill_flops / prefill.needed_flops - 1,
        decode_flops_error=decode_flops / decode.needed_flops - 1 if steps else None,
        ttft_s=prefill_flops / effective if peak else None,
        tpot_s=max(bandwidth_s, compute_s or 0.0) if steps else None,
        tpot_compute_s=compute_s if steps else None,
        tpot_bandwidth_s=bandwidth_s if steps else None,
    )


def _prediction(
    config, precision, gpu, prefill, decode, n_prompt, n_output, batch, n_cached, engine, n_gpus, compute
):
    gpu = parallel.together(gpu_profile(gpu), n_gpus, config)
    engine = engines.engine(engine, gpu.vendor)
    sizes = _sizes(config, precision)
    formats = engine.formats(sizes.quantised) if compute is None else None
    compute = compute_format(precision, compute)
    if formats:  # the fastest, as far as its rate is known
        compute = max(formats, key=lambda name: gpu.matmul_flops_per_s.get(name, 0.0))
    peak = gpu.matmul_flops_per_s.get(compute)
    missing = [] if peak else [f"matmul_flops_per_s.{compute}"]
    missing += [] if gpu.vector_flops_per_s else ["vector_flops_per_s"]
    tokens = batch * (n_prompt - n_cached), batch * decode.n_forwards
    exchange_s = [parallel.all_reduce_s(config, precision, gpu, n_gpus, n_tokens) for n_tokens in tokens]
    if None in exchange_s:
        missing, exchange_s = missing + ["interconnect_bytes_per_s"], (0.0, 0.0)
    roofline = _level(roofline_s, prefill, decode, gpu, peak, n_output, exchange_s)
    request = n_prompt, n_output, batch, n_cached
    cache = gpu.last_level_cache_bytes
    step_bytes = decode.streamed_bytes / decode.n_forwards if decode.n_forwards else prefill.streamed_bytes
    needed = sizes.resident_bytes + _kv_bytes_held(config, precision, n_prompt + n_output - 1, batch)
    return Prediction(
        gpu=gpu,
        compute=compute,
        floor=_level(floor_s, prefill, decode, gpu, peak, n_output),
        roofline=roofline,
        expected=expected.level(engine, gpu, compute, works(config, precision, prefill, decode, *request), roofline, exchange_s, n_output),
        engine=engine,
        n_gpus=n_gpus,
        rough=_rough(sizes, gpu, peak, prefill, decode, n_prompt, n_output, batch),
        prefill=prefill,
        decode=decode,
        missing=tuple(missing),
        floor_applies=None if cache is None else step_bytes > CACHE_MARGIN * cache,
        ridge=peak / gpu.memory_bytes_per_s if peak else None,
        fits=needed <= gpu.memory_bytes,
        memory_bytes_needed=needed,
        request=(config, precision, batch),
    )


def compute_format(precision, compute=None):
    """The format whose matmul rate to use: `compute`, or by default that of the activations."""
    if compute is not None and compute not in COMPUTE_FORMATS:
        raise UnknownName("compute format", compute, COMPUTE_FORMATS)
    return str(precision.activations) if compute is None else compute
