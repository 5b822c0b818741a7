"""One request, run, counted, checked and predicted: what `tools/trace.py` prints.

`trace` returns plain dicts and lists, ready for JSON: schema "npinfer-trace/1".
Nothing is formatted or scaled here.
"""

import sys
from dataclasses import asdict, fields
from time import perf_counter

from costmodel import caching, experts, formulas
from costmodel.loads import decode_load, forward_load
from costmodel.operations import operation_counts, sample_counts
from costmodel.prediction import predict_from
from costmodel.tensors import tensors
from npinfer import Ledger, generate
from npinfer.checks import whole
from npinfer.ledger import Counts

SCHEMA = "npinfer-trace/1"
MODEL_FIELDS = (
    "name", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "tie_embeddings",
    "qkv_bias", "o_bias", "mlp_bias", "sliding_window", "rope_theta", "norm_eps", "max_context",
)  # fmt: skip
LEVEL_FIELDS = (
    "ttft_s", "tpot_s", "latency_s", "latency_exact_s", "tokens_per_s", "prefill_bound", "decode_bound",
)  # fmt: skip
ROUGH_FIELDS = (
    "eta", "n_params", "prefill_flops", "decode_flops", "prefill_flops_error", "decode_flops_error",
    "ttft_s", "tpot_s", "tpot_compute_s", "tpot_bandwidth_s",
)  # fmt: skip


def trace(
    model, tokens, n_output, gpus, compute=None, n_prefix=0, turns=(), on_token=None, engine="generic", n_gpus=1,
    explain=False, advise=False, sampler=None, stop=False,
):  # fmt: skip
    """Run a request and report on it.

    Parameters
    ----------
    model : npinfer.Transformer
        Numeric or shape-only.
    tokens : integer array (batch, n_prompt)
    n_output : int
    gpus : list of GPU
    compute : str, optional
        As for `predict`.
    n_prefix : int
        The first prompt tokens that a cache holds already: adds the same request, started from them.
    turns : list of int
        Prompt lengths of a dialogue: adds what a session cache saves in each turn.
    on_token : callable, optional
        As for `npinfer.generate`.
    engine, n_gpus : str, int
        As for `predict`.
    explain, advise : bool
        Whether to add the formula of each headline number, and what each lever would change on each GPU.
    sampler, stop : optional
        As for `npinfer.generate`.  Where a stop token ends a run, the report is of the tokens that there were.

    Returns
    -------
    report : dict
        Its keys are in the README, "JSON".
    ledger : npinfer.Ledger
        For details by layer or step.
    """
    config, precision = model.config, model.precision
    batch, n_prompt = tokens.shape
    times_s = []

    def at_token(ids):
        times_s.append(perf_counter())
        if on_token is not None:
            on_token(ids)

    start_s = perf_counter()
    with Ledger() as ledger:
        generate(model, tokens, n_output, on_token=at_token, sampler=sampler, stop=stop)
    n_output = len(times_s)
    request = {"config": config, "precision": precision, "n_prompt": n_prompt, "n_output": n_output, "batch": batch}
    device = {"compute": compute, "engine": engine, "n_gpus": n_gpus}
    by_op = {key: counts for key, (_, counts) in ledger.by("phase", "op").items()}
    touched = _touched(model, ledger, n_output)
    described = {"batch": batch, "prompt_tokens": n_prompt, "output_tokens": n_output, "prefix_tokens": n_prefix}
    report = {
        "schema": SCHEMA,
        "mode": "numeric" if model.numeric else "shape-only",
        "model": _model(config),
        "request": described | ({"sampler": asdict(sampler)} if sampler else {}),
        "precision": _precision(precision),
        "memory": _memory(config, precision, batch, n_prompt + n_output - 1),
        "counts": _phase_counts(ledger),
        "operations": [
            {"phase": phase, "op": op, "calls": calls, **counts._asdict()}
            for (phase, op), (calls, counts) in ledger.by("phase", "op").items()
        ],
        "experts_touched": touched if config.experts else None,
        "closed_form": {"agrees": closed_forms(**request, touched=touched, sampler=sampler) == by_op},
        "predictions": [_prediction(predict_from(ledger, gpu, **request, **device)) for gpu in gpus],
        "prefix": caching.prefix_saving(config, precision, gpus, n_prompt, n_prefix, batch, **device) if n_prefix else None,
        "session": caching.session_saving(config, precision, gpus, turns, batch, **device) if turns else None,
        "measured": _measured(start_s, times_s) if model.numeric else None,
        "explain": _explained(**request, gpus=gpus, **device) if explain else None,
        "advice": _advice(**request, gpus=gpus, **device) if advise else None,
    }
    return report, ledger


def whole_request(batch, n_prompt, n_output):
    """(batch, n_prompt), the shape of the request's tokens, or an `InputError` that names the number that is wrong."""
    whole("output tokens", n_output)
    return whole("batch", batch), whole("prompt tokens", n_prompt)


def n_tensors(config):
    """How many tensors a model of this config is laid out from."""
    return sum([len(tensor.layers) * tensor.n_copies for tensor in tensors(config).values()])


def closed_forms(config, precision, n_prompt, n_output, batch, touched="expected", sampler=None):
    """Counts of every operation by closed form: (phase, op) -> Counts, sampling included.

    Parameters
    ----------
    touched : {"expected", "all"} or list of lists
        Experts that are read; as observed, those of each sparse layer in each forward.
    sampler : npinfer.Sampler, optional
    """
    n_steps, seen = n_output - 1, not isinstance(touched, str)
    loads = {"prefill": [forward_load(config, precision, batch, 0, n_prompt, experts_touched=touched[0] if seen else touched)]}
    if n_steps and seen and touched[0]:
        loads["decode"] = [
            forward_load(config, precision, batch, n_prompt + step, 1, experts_touched=touched[step + 1]) for step in range(n_steps)
        ]
    elif n_steps:
        loads["decode"] = [decode_load(config, precision, batch, n_prompt, n_steps, "expected" if seen else touched)]
    by_op = {}
    for phase, of_phase in loads.items():
        for load in of_phase:
            for op, counts in operation_counts(config, precision, load).items():
                by_op[phase, op] = by_op.get((phase, op), Counts()) + counts
        by_op[phase, "sample"] = sample_counts(config, precision, batch, sampler) * (n_steps if phase == "decode" else 1)
    return by_op


def _touched(model, ledger, n_output):
    """Experts that a run read, as `closed_forms` takes it."""
    if not model.numeric:
        return model.experts
    return [experts.observed(ledger, model.config, model.precision, forward) for forward in range(n_output)]


def by_layer(ledger):
    """Totals of each layer and phase: a list of dicts; layer None is what lies outside the layers."""
    totals = {}
    for entry in ledger.entries():
        for layer in entry.layers or (None,):
            key = entry.phase, layer
            totals[key] = totals.get(key, Counts()) + entry.counts
    return [{"phase": phase, "layer": layer, **counts._asdict()} for (phase, layer), counts in totals.items()]


def by_step(ledger):
    """Totals of each forward: a list of dicts; step 0 is the prefill."""
    return [
        {"phase": phase, "step": step, **counts._asdict()}
        for (phase, step), (_, counts) in ledger.by("phase", "forward").items()
    ]


def _model(config):
    """What the model is: its dimensions always, and of the rest what is not the default."""
    every, described = asdict(config), {name: getattr(config, name) for name in MODEL_FIELDS}
    described |= {field.name: every[field.name] for field in fields(config) if every[field.name] != field.default}
    return described | {
        "n_parameters": formulas.n_parameters(config),
        "n_active_parameters": formulas.n_active_parameters(config),
        "n_streamed_parameters": formulas.n_streamed_parameters(config),
    }


def _precision(precision):
    described = {field: str(getattr(precision, field)) for field in ("weights", "kv", "activations")}
    if precision.bits_per_weight is not None:
        described["bits_per_weight"] = precision.bits_per_weight
    if precision.exceptions:
        described["exceptions"] = [[tensor, layer, str(format_)] for tensor, layer, format_ in precision.exceptions]
    return described


def _memory(config, precision, batch, n_context):
    return {
        "weight_bytes_resident": formulas.weight_bytes(config, precision),
        "weight_bytes_streamed": formulas.weight_bytes(config, precision, streamed=True),
        "kv_bytes_per_token": formulas.kv_bytes_per_token(config, precision),
        "kv_bytes": formulas.kv_bytes_held(config, precision, n_context, batch),
    }


def _phase_counts(ledger):
    last = len(ledger.forwards) - 1
    return {
        "prefill": ledger.total(phase="prefill")._asdict(),
        "decode": ledger.total(phase="decode")._asdict(),
        "decode_first_step": ledger.total(forward=1)._asdict() if last else None,
        "decode_last_step": ledger.total(forward=last)._asdict() if last else None,
    }


def _prediction(prediction):
    return {
        "gpu": prediction.gpu.name,
        "n_gpus": prediction.n_gpus,
        "compute": prediction.compute,
        "fits": prediction.fits,
        "memory_bytes_needed": prediction.memory_bytes_needed,
        "memory_bytes": prediction.gpu.memory_bytes,
        "max_context_tokens": prediction.max_context,
        "missing_rates": list(prediction.missing),
        "floor_applies": prediction.floor_applies,
        "ridge_flops_per_byte": prediction.ridge,
        "prefill_flops_per_byte": prediction.prefill.intensity,
        "decode_flops_per_byte": prediction.decode.intensity,
        "floor": _fields(prediction.floor, LEVEL_FIELDS),
        "roofline": _fields(prediction.roofline, LEVEL_FIELDS),
        "expected": _fields(prediction.expected, prediction.expected._fields),
        "rough": _fields(prediction.rough, ROUGH_FIELDS),
    }


def _explained(**request):
    from costmodel.explain import explain

    return explain(**request)


def _advice(gpus, **request):
    """GPU name -> advice."""
    from costmodel.advice import advise

    return {gpu.name: advise(gpu=gpu, **request) for gpu in gpus}


def _measured(start_s, times_s):
    ttft_s, tpot_s = formulas.token_times(start_s, times_s)
    return {"ttft_s": ttft_s, "tpot_s": tpot_s, "peak_memory_bytes": _peak_memory_bytes()}


def _peak_memory_bytes():
    """The most memory this process has held so far, or None where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # ru_maxrss would begin with the peak of the parent
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def _fields(record, names):
    return {name: getattr(record, name) for name in names}
