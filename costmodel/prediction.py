"""From a request to seconds: what a GPU needs at least, and what it may need.

Read `predict`, which counts by closed forms, then `_prediction`: the counts at
every level of `costmodel.levels` and, by an engine's calibrated profile, of
`costmodel.expected`.
"""

from functools import lru_cache
from typing import NamedTuple

from costmodel import engines, expected, experts, formulas, levels, loads, operations, parallel
from costmodel.arguments import whole_numbers
from costmodel.levels import Level, Phase, Rough
from costmodel.profiles import COMPUTE_FORMATS
from costmodel.profiles import gpu as gpu_profile
from npinfer.errors import InputError, UnknownName

CACHE_MARGIN = 4  # a step must stream this many times the last-level cache for its bandwidth floor to hold


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
    config, precision, gpu, n_prompt=1000, n_output=100, batch=1, n_cached=0, engine="generic", n_gpus=1, compute=None,
    *, sampler=None, experts_touched="expected",
):  # fmt: skip
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
    sampler : npinfer.Sampler, optional
        How tokens are drawn; default greedy.
    experts_touched : {"expected", "all"}
        As for `decode_counts_total`.

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
    n_prompt = whole_numbers("n_prompt", n_prompt, 1)
    n_cached = whole_numbers("n_cached", n_cached, 0)
    n_steps = whole_numbers("n_output", n_output, 1) - 1
    batch = whole_numbers("batch", batch, 1)
    if n_cached >= n_prompt:
        raise InputError(f"n_cached is {n_cached} of n_prompt {n_prompt}; at least the last token is computed")
    sample = _sizes(config, precision).sample
    if sampler is not None:
        sample = operations.Cost.of(operations.sample_counts(config, precision, 1, sampler))

    def phase(load, n_forwards):
        sampling = [number * batch * n_forwards for number in sample]
        costs = [*operations.operation_costs(config, precision, load), sampling]
        return Phase.of(costs, n_forwards, experts.surplus_bytes(config, precision, load))

    prefill = phase(
        loads.forward_load(config, precision, batch, n_cached, n_prompt - n_cached, experts_touched=experts_touched), 1
    )
    decode = Phase.of([], 0)
    if n_steps:
        decode = phase(loads.decode_load(config, precision, batch, n_prompt, n_steps, experts_touched), n_steps)
    return _prediction(config, precision, gpu, prefill, decode, n_prompt, n_output, batch, n_cached, engine, n_gpus, compute)


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
    costs, surplus = {"prefill": [], "decode": []}, {"prefill": 0, "decode": 0}
    for (phase, op), (_, counts) in ledger.by("phase", "op").items():
        if op != "cache_load":  # the interpreter's own copy; a GPU attends to shared blocks in place
            costs[phase].append(operations.Cost.of(counts))
        if op != "embed":
            surplus[phase] += counts.weight_bytes_read
    phases = []
    for phase, n_forwards in (("prefill", 1), ("decode", n_output - 1)):
        beyond = surplus[phase] - n_forwards * _sizes(config, precision).streamed_bytes
        phases.append(Phase.of(costs[phase], n_forwards, beyond if config.experts else 0))
    return _prediction(config, precision, gpu, *phases, n_prompt, n_output, batch, 0, engine, n_gpus, compute)


class _Sizes(NamedTuple):
    """What a prediction takes from a model and its formats alone, worked once."""

    resident_bytes: int
    streamed_bytes: int  # by one token
    n_params_of_a_token: int  # streamed
    sample: operations.Cost  # of one sequence and forward
    model: expected.Model


@lru_cache(maxsize=256)
def _sizes(config, precision):
    n_streamed = formulas.n_streamed_parameters(config)
    resident = formulas.weight_bytes(config, precision)
    streamed = formulas.weight_bytes(config, precision, streamed=True)
    return _Sizes(
        resident,
        streamed,
        formulas.n_token_parameters(config),
        operations.Cost.of(operations.sample_counts(config, precision, 1)),
        expected.model(config, precision, resident, streamed, n_streamed),
    )


def works(config, precision, prefill, decode, n_prompt, n_output, batch, n_cached):
    """What the expected times of both phases depend on: two `expected.Work`, the second None without decode steps."""
    model = _sizes(config, precision).model
    first = expected.work(model, prefill, batch, n_cached, n_prompt - n_cached, False)
    return first, expected.work(model, decode, batch, n_prompt, n_output - 1, True) if decode.n_forwards else None


_kv_bytes_held = formulas.kv_bytes_held.__wrapped__  # the numbers are checked, and no arrays


def _prediction(
    config, precision, gpu, prefill, decode, n_prompt, n_output, batch, n_cached, engine, n_gpus, compute
):
    gpu, engine, compute = device(config, precision, gpu, engine, n_gpus, compute)
    sizes = _sizes(config, precision)
    peak = gpu.matmul_flops_per_s.get(compute)
    missing = [] if peak else [f"matmul_flops_per_s.{compute}"]
    missing += [] if gpu.vector_flops_per_s else ["vector_flops_per_s"]
    tokens = batch * (n_prompt - n_cached), batch * decode.n_forwards
    exchange_s = [parallel.all_reduce_s(config, precision, gpu, n_gpus, n_tokens) for n_tokens in tokens]
    if None in exchange_s:
        missing, exchange_s = missing + ["interconnect_bytes_per_s"], (0.0, 0.0)
    roofline = levels.level(levels.roofline_s, prefill, decode, gpu, peak, n_output, exchange_s)
    works_ = works(config, precision, prefill, decode, n_prompt, n_output, batch, n_cached)
    cache = gpu.last_level_cache_bytes
    step_bytes = decode.least_bytes / decode.n_forwards if decode.n_forwards else prefill.least_bytes
    needed = sizes.resident_bytes + _kv_bytes_held(config, precision, n_prompt + n_output - 1, batch)
    used = sizes.n_params_of_a_token, sizes.streamed_bytes
    return Prediction(
        gpu=gpu,
        compute=compute,
        floor=levels.level(levels.floor_s, prefill, decode, gpu, peak, n_output),
        roofline=roofline,
        expected=expected.level(engine, gpu, compute, works_, roofline, exchange_s, n_output),
        engine=engine,
        n_gpus=n_gpus,
        rough=levels.rough(*used, gpu, peak, prefill, decode, n_prompt, n_output, batch),
        prefill=prefill,
        decode=decode,
        missing=tuple(missing),
        floor_applies=None if cache is None else step_bytes > CACHE_MARGIN * cache,
        ridge=peak / gpu.memory_bytes_per_s if peak else None,
        fits=needed <= gpu.memory_bytes,
        memory_bytes_needed=needed,
        request=(config, precision, batch),
    )


def device(config, precision, gpu, engine="generic", n_gpus=1, compute=None):
    """What a request runs on: all devices as one, the engine's profile, and the format whose matmul rate is used."""
    gpu = parallel.together(gpu_profile(gpu), n_gpus, config)
    if engine == "generic" and gpu.interpreter:
        engine = "npinfer"  # only it was measured
    engine = engines.engine(engine, gpu.vendor)
    if engine.interpreted and n_gpus > 1:
        raise InputError(f"{gpu.name}: n_gpus is {n_gpus}, and the interpreter runs on one machine; leave n_gpus (--gpus) at 1")
    if engine.compute and compute is None:  # the fastest that it has kernels for, as far as its rate is known
        formats = engine.formats(_sizes(config, precision).model.quantised)
        return gpu, engine, max(formats, key=lambda name: gpu.matmul_flops_per_s.get(name, 0.0))
    return gpu, engine, compute_format(precision, compute)


def compute_format(precision, compute=None):
    """The format whose matmul rate to use: `compute`, or by default that of the activations."""
    if compute is not None and compute not in COMPUTE_FORMATS:
        raise UnknownName("compute format", compute, COMPUTE_FORMATS)
    return str(precision.activations) if compute is None else compute
