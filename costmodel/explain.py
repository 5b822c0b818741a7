"""Each headline number of a trace, beside the formula that gives it: the `explain` of a trace.

The formulas are those of this package, called with `costmodel.traced` numbers
in place of plain ones: what is printed is what they do.  A number that has a
line of its own stands under its name in the lines behind it.
"""

from functools import partial

from costmodel import experts, formulas, loads, operations, prediction
from costmodel.arguments import most, whole_numbers
from costmodel.explain_weights import COUNTED, Lines, Weights
from costmodel.levels import ETA, Phase
from costmodel.traced import Traced
from costmodel.traced_model import Parts, TracedModel
from npinfer.ledger import Counts

ATTENTION = "kv_expand", "attn_scores", "attn_mix"


def _loads(lines, phase, model, weights, load_of, batch):
    """Explain the sums of a phase; what lies outside the layers is asked for, and one layer of each kind.

    Parameters
    ----------
    load_of : callable
        Gives the load of a config and a precision.
    batch : Traced
        Tokens of a decode step.

    Returns
    -------
    outside : Load
    each : list of Load
        Sums that have a line by name.
    """
    outside, each = load_of(model.none, model.precision), [load_of(kind.config, kind.precision) for kind in model.kinds]
    tokens = lines.add(f"{phase}_tokens", outside.tokens, "", "9")
    seen = [load.attention[0] for load in each]
    keys = lines.add_each(f"{phase}_keys", [one.keys for one in seen], model.kinds, "", "4.2")
    pairs, masked = keys, [0] * len(seen)
    if phase == "prefill":  # a decode step has as many pairs as keys, and masks none
        pairs = lines.add_each(f"{phase}_pairs", [one.pairs for one in seen], model.kinds, "", COUNTED)
        masked = lines.add_each(f"{phase}_masked_pairs", [one.masked for one in seen], model.kinds, "", COUNTED)
    each = [
        load._replace(tokens=tokens, attention=(loads.Attention(*sums),))
        for load, *sums in zip(each, keys, pairs, masked)
    ]
    sparse = [number for number, layers in enumerate(weights.sparse) if layers]
    if sparse:
        kinds, have = [model.kinds[number] for number in sparse], [weights.sparse[number] for number in sparse]
        of_forward = tokens if phase == "prefill" else batch
        lines.add(f"{phase}_expert_share", experts.expected_share(have[0].experts, of_forward), "", COUNTED)
        read = [outside.forwards * layers.read(of_forward) for layers in have]
        read = lines.add_each(f"{phase}_expert_bytes_read", read, kinds, "B", COUNTED)
        for number, nbytes in zip(sparse, read):  # of all projections together
            touched = experts.Touched(nbytes, 0), *[experts.Touched(0, 0)] * (len(experts.PROJECTIONS) - 1)
            each[number] = each[number]._replace(experts=touched)
    return outside._replace(tokens=tokens), each


def _phase(lines, phase, model, weights, outside, each):
    """Explain the counts of a phase under these loads; sampling has none of them."""
    n_forwards = outside.forwards
    by_op = [operations.operation_counts(kind.config, kind.precision, load) for kind, load in zip(model.kinds, each)]
    outside = sum(operations.operation_counts(model.none, model.precision, outside).values(), Counts())
    counts = [sum(ops.values(), Counts()) - outside for ops in by_op]

    def parts(field):
        return Parts(getattr(outside, field), [getattr(one, field) for one in counts])

    flops = parts("matmul_flops")
    attention = [sum([ops[op].matmul_flops for op in ATTENTION if op in ops]) for ops in by_op]
    linear = [one - pairs for one, pairs in zip(flops.each, attention)]
    linear = lines.add_each(f"{phase}_layer_linear_flops", linear, model.kinds, "FLOP", "9")
    attention = lines.add_each(f"{phase}_layer_attention_flops", attention, model.kinds, "FLOP", COUNTED)
    flops = model.whole(flops._replace(each=[sum(both) for both in zip(linear, attention)]))
    flops = lines.add(f"{phase}_matmul_flops", flops, "FLOP", "9, exactly")
    if phase == "prefill":
        masked = lines.add(f"{phase}_masked_flops", model.whole(parts("masked_flops")), "FLOP", COUNTED)
        flops = lines.add(f"{phase}_needed_flops", flops - masked, "FLOP", COUNTED)
    beyond, surplus = _surplus(lines, phase, model, weights, each)
    streamed = Parts(n_forwards * weights.streamed.outside, [n_forwards * one for one in weights.streamed.each])
    read = model.whole(parts("weight_bytes_read") - streamed - beyond) + n_forwards * weights.name + surplus
    moved = lines.add(f"{phase}_weight_bytes_read", read, "B", "4.1")
    for field in ("kv_bytes_read", "kv_bytes_written"):
        moved += lines.add(f"{phase}_{field}", model.whole(parts(field)), "B", "4.2")
    moved = least = lines.add(f"{phase}_streamed_bytes", moved, "B", "5")
    if any(weights.sparse):
        least = lines.add(f"{phase}_least_bytes", moved - surplus, "B", "5")
    explained = Phase([], n_forwards, flops, moved, least)
    lines.add(f"{phase}_flops_per_byte", explained.intensity, "FLOP/B", "3")
    return explained


def _surplus(lines, phase, model, weights, each):
    """Bytes of experts beyond those of one token in each forward: expressions, and the name of all; 0 without experts."""
    parts, named = Parts(0, [0] * len(each)), Parts(0, [0] * len(each))
    for number, (layers, kind, load) in enumerate(zip(weights.sparse, model.kinds, each)):
        if layers:
            parts.each[number] = experts.surplus_bytes(kind.config, kind.precision, load)
            named.each[number] = layers.in_terms(parts.each[number], -load.forwards * layers.experts.n_active)
    return parts, lines.add(f"{phase}_surplus_bytes", model.whole(named), "B", COUNTED) if any(weights.sparse) else 0


def explain(config, precision, gpus, n_prompt, n_output, batch=1, compute=None, engine="generic", n_gpus=1):
    """Lines of name, expression, values filled in, value, unit, and section of the textbook or source.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    gpus : list of GPU
    n_prompt, n_output, batch, compute, engine, n_gpus
        As for `predict`.

    Returns
    -------
    list of dict
        "expression" and "values" have + - x / **, parentheses, min, max, floor, ceil and round, "B" behind bytes per element,
        and floats to six digits; "gpu" is None for what does not depend on one.
    """
    request = {"batch": batch, "n_prompt": n_prompt, "n_output": n_output}
    batch, n_prompt, n_output = [
        Traced.named(name, whole_numbers(name, value, 1)) for name, value in request.items()
    ]
    lines = Lines()
    n_steps = lines.add("n_steps", n_output - 1, "", "README, JSON")
    model = TracedModel(config, precision)
    weights = Weights(lines, model)
    lines.add("kv_bytes_per_token", formulas.kv_bytes_per_token(model.config, precision), "B", "4.2")
    n_context = lines.add("n_context", n_prompt + n_steps, "", "4.2")
    held = partial(formulas.kv_bytes_held, n_context=n_context, batch=batch)
    lines.add("kv_bytes", model.whole(model.parts(held)), "B", "4.2")

    def prefill_load(config, precision):
        return loads.forward_load(config, precision, batch, 0, n_prompt)

    def decode_load(config, precision):
        return loads.decode_load(config, precision, batch, n_prompt, n_steps)

    prefill = _phase(lines, "prefill", model, weights, *_loads(lines, "prefill", model, weights, prefill_load, batch))
    decode = None
    if n_steps.value:
        decode = _phase(lines, "decode", model, weights, *_loads(lines, "decode", model, weights, decode_load, batch))
    for gpu in gpus:
        add = partial(lines.add, gpu=gpu.name)
        gpu, _, used = prediction.device(config, precision, gpu, engine, n_gpus, compute)
        peak = gpu.matmul_flops_per_s.get(used)
        bytes_per_s = Traced.named("memory_bytes_per_s", gpu.memory_bytes_per_s)
        peak = Traced.named("matmul_flops_per_s", peak) if peak else None
        _floor(add, prefill, decode, peak, bytes_per_s, n_output)
        _rough(add, batch, n_prompt, weights, decode, peak, bytes_per_s)
    return list(lines)


def _floor(add, prefill, decode, peak, bytes_per_s, n_output):
    """Explain what `prediction.floor_s` makes of the phases; a rate that is missing leaves its term out."""
    ttft_s = tpot_s = None
    if peak:
        add("ridge_flops_per_byte", peak / bytes_per_s, "FLOP/B", "3")
        seconds = formulas.ttft_floor_s(prefill.needed_flops, peak, prefill.least_bytes, bytes_per_s)
        ttft_s = add("ttft_floor_s", seconds, "s", "10")
    if decode:
        computing = (decode.needed_flops, peak) if peak else ()
        seconds = formulas.tpot_floor_s(decode.least_bytes, bytes_per_s, *computing)
        tpot_s = add("tpot_floor_s", seconds / decode.n_forwards, "s", "5, 10")
    if ttft_s and tpot_s:
        add("latency_floor_s", formulas.latency_s(ttft_s, tpot_s, n_output), "s", "6")
        add("latency_exact_floor_s", formulas.latency_exact_s(ttft_s, tpot_s, n_output), "s", "README, JSON")
        add("tokens_per_s_floor", formulas.tokens_per_s(ttft_s, tpot_s, n_output), "tokens/s", "8")


def _rough(add, batch, n_prompt, weights, decode, peak, bytes_per_s):
    """Explain the textbook's estimates; of the decode FLOPs, those of one token."""
    computing_s = 0.0
    if peak:
        effective = formulas.effective_flops_per_s(peak, Traced.named("eta", ETA))
        flops = formulas.prefill_flops_rough(batch, n_prompt, weights.n_params)
        add("ttft_rough_s", flops / effective, "s", "9")
        computing_s = formulas.decode_flops_rough(batch, 1, weights.n_params) / effective
    if decode:
        moving_s = formulas.tpot_floor_s(weights.name, bytes_per_s)
        if peak:
            computing_s = add("tpot_compute_rough_s", computing_s, "s", "9")
        moving_s = add("tpot_bandwidth_rough_s", moving_s, "s", "5")
        add("tpot_rough_s", most(moving_s, computing_s), "s", "10")
