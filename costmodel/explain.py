"""Each headline number of a trace, beside the formula that gives it: the `explain` of a trace.

The formulas are those of this package, called with `costmodel.traced` numbers
in place of plain ones: what is printed is what they do.  A number that has a
line of its own stands under its name in the lines behind it.
"""

from dataclasses import fields
from functools import partial

from costmodel import formulas, loads, operations
from costmodel.levels import ETA, Phase
from costmodel.prediction import compute_format
from costmodel.traced import NAMES, VALUES, Traced
from npinfer.ledger import Counts

COUNTED = "README, What is counted"


class _Windows(tuple):
    """Windows of the layers, whose numbers of layers are traced."""

    def count(self, window):
        return self.times[window]


class _Sizes:
    """A config whose whole numbers are traced under their own names."""

    def __init__(self, config):
        self._config = config
        for field in fields(config):
            value = getattr(config, field.name)
            if type(value) is int:
                setattr(self, field.name, Traced.named(field.name, value))
        kinds = dict.fromkeys(config.windows)
        if len(kinds) == 1:
            (window,) = kinds
            names = {window: None if window is None else self.sliding_window}
            times = {names[window]: self.n_layers}
        else:  # a kind of layers is named by its window
            names = {window: None if window is None else Traced.named(f"window_{window}", window) for window in kinds}
            times = {
                names[window]: Traced.named(f"n_layers_window_{window or 'none'}", config.windows.count(window))
                for window in kinds
            }
        self.windows = _Windows([names[window] for window in config.windows])
        self.windows.times = times

    def __getattr__(self, name):
        return getattr(self._config, name)

    def of_layers(self, n_layers):
        """The same sizes of a model of so many layers, a plain number."""
        other = object.__new__(_Sizes)
        vars(other).update(vars(self) | {"n_layers": n_layers})
        return other


class _Lines(list):
    """Explanations in the order in which they are read."""

    def add(self, name, number, unit, section, gpu=None):
        """Explain `number`, and return it as what later lines know by its name."""
        self.append(
            {
                "name": name,
                "gpu": gpu,
                "expression": number.text(NAMES),
                "values": number.text(VALUES),
                "value": number.value,
                "unit": unit,
                "section": section,
            }
        )
        return Traced.named(name, number.value)


def _in_terms_of(number, whole, name, times=1):
    """`number`, with `times` the expression of `whole` in it written as its name."""
    return number - times * whole + times * name


def _weights(lines, sizes, precision):
    """Explain parameters and weight bytes.

    Returns
    -------
    n_params : Traced
        Streamed parameters, by name.
    weights : tuple of Traced
        Streamed bytes, their expression and their name.
    """
    whole, streamed = formulas.n_parameters(sizes), formulas.n_streamed_parameters(sizes)
    name = lines.add("n_parameters", whole, "", "4.1")
    n_params = lines.add("n_streamed_parameters", _in_terms_of(streamed, whole, name), "", "4.1")
    one, none = [formulas.weight_bytes(sizes.of_layers(n), precision) for n in (1, 0)]
    layer = lines.add("layer_weight_bytes", one - none, "B", "4.1")
    whole, streamed = [formulas.weight_bytes(sizes, precision, streamed) for streamed in (False, True)]
    name = lines.add("weight_bytes_resident", _in_terms_of(whole, one - none, layer, sizes.n_layers), "B", "4.1")
    return n_params, (streamed, lines.add("weight_bytes_streamed", _in_terms_of(streamed, whole, name), "B", "4.1"))


def _attention(lines, phase, load, sizes):
    """Explain what a phase's attention sees, a line for each kind of layers; the load, with those names in it."""
    attention = []
    kinds = loads.layers_by_window(sizes)
    for (window, _), seen in zip(kinds, load.attention):
        kind = "" if len(kinds) == 1 else f"_window_{'none' if window is None else window.value}"
        keys = lines.add(f"{phase}_keys{kind}", seen.keys, "", "4.2")
        pairs = keys if seen.pairs is seen.keys else lines.add(f"{phase}_pairs{kind}", seen.pairs, "", COUNTED)
        masked = seen.masked and lines.add(f"{phase}_masked_pairs{kind}", seen.masked, "", COUNTED)
        attention.append(loads.Attention(keys, pairs, masked))
    return load._replace(attention=tuple(attention))


def explain(config, precision, gpus, n_prompt, n_output, batch=1, compute=None):
    """Lines of name, expression, values filled in, value, unit, and section of the textbook or source.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    gpus : list of GPU
    n_prompt, n_output, batch, compute
        As for `predict`.

    Returns
    -------
    list of dict
        "expression" and "values" have + - x /, parentheses, min, max, floor and ceil, "B" behind bytes per element,
        and floats to six digits; "gpu" is None for what does not depend on one.
    """
    request = {"batch": batch, "n_prompt": n_prompt, "n_output": n_output}
    batch, n_prompt, n_output = [
        Traced.named(name, loads.whole_numbers(name, value, 1)) for name, value in request.items()
    ]
    lines = _Lines()
    n_steps = lines.add("n_steps", n_output - 1, "", "README, JSON")
    sizes = _Sizes(config)
    n_params, weights = _weights(lines, sizes, precision)
    lines.add("kv_bytes_per_token", formulas.kv_bytes_per_token(sizes, precision), "B", "4.2")
    lines.add("kv_bytes", formulas.kv_bytes_held(sizes, precision, n_prompt + n_steps, batch), "B", "4.2")
    row_bytes = partial(operations.stored_rows_bytes, precision, sizes.d_model)
    load = loads.forward_load(sizes, row_bytes, batch, 0, n_prompt)
    load = _attention(lines, "prefill", load, sizes)
    prefill = _phase(lines, "prefill", operations.operation_counts(sizes, precision, load), 1, weights)
    decode = None
    if n_steps.value:
        load = loads.decode_load(sizes, row_bytes, batch, n_prompt, n_steps)
        load = _attention(lines, "decode", load, sizes)
        decode = _phase(lines, "decode", operations.operation_counts(sizes, precision, load), n_steps, weights)
    for gpu in gpus:
        add = partial(lines.add, gpu=gpu.name)
        peak = gpu.matmul_flops_per_s.get(compute_format(precision, compute))
        bytes_per_s = Traced.named("memory_bytes_per_s", gpu.memory_bytes_per_s)
        peak = Traced.named("matmul_flops_per_s", peak) if peak else None
        _floor(add, prefill, decode, peak, bytes_per_s, n_output)
        _rough(add, batch, n_prompt, n_params, weights[1], decode, peak, bytes_per_s)
    return list(lines)


def _phase(lines, phase, by_op, n_forwards, weights):
    """Explain the counts of a phase; sampling has none of these."""
    counts = sum(by_op.values(), Counts())
    flops = lines.add(f"{phase}_matmul_flops", counts.matmul_flops, "FLOP", "9, exactly")
    if counts.masked_flops.terms:
        masked = lines.add(f"{phase}_masked_flops", counts.masked_flops, "FLOP", COUNTED)
        flops = lines.add(f"{phase}_needed_flops", flops - masked, "FLOP", COUNTED)
    read = _in_terms_of(counts.weight_bytes_read, *weights, n_forwards)
    moved = lines.add(f"{phase}_weight_bytes_read", read, "B", "4.1")
    moved += lines.add(f"{phase}_kv_bytes_read", counts.kv_bytes_read, "B", "4.2")
    moved += lines.add(f"{phase}_kv_bytes_written", counts.kv_bytes_written, "B", "4.2")
    moved = lines.add(f"{phase}_streamed_bytes", moved, "B", "5")
    phase_ = Phase([], n_forwards, flops, moved)
    lines.add(f"{phase}_flops_per_byte", phase_.intensity, "FLOP/B", "3")
    return phase_


def _floor(add, prefill, decode, peak, bytes_per_s, n_output):
    """Explain what `prediction.floor_s` makes of the phases; a rate that is missing leaves its term out."""
    ttft_s = tpot_s = None
    if peak:
        add("ridge_flops_per_byte", peak / bytes_per_s, "FLOP/B", "3")
        seconds = formulas.ttft_floor_s(prefill.needed_flops, peak, prefill.streamed_bytes, bytes_per_s)
        ttft_s = add("ttft_floor_s", seconds, "s", "10")
    if decode:
        computing = (decode.needed_flops, peak) if peak else ()
        seconds = formulas.tpot_floor_s(decode.streamed_bytes, bytes_per_s, *computing)
        tpot_s = add("tpot_floor_s", seconds / decode.n_forwards, "s", "5, 10")
    if ttft_s and tpot_s:
        add("latency_floor_s", formulas.latency_s(ttft_s, tpot_s, n_output), "s", "6")
        add("latency_exact_floor_s", formulas.latency_exact_s(ttft_s, tpot_s, n_output), "s", "README, JSON")
        add("tokens_per_s_floor", formulas.tokens_per_s(ttft_s, tpot_s, n_output), "tokens/s", "8")


def _rough(add, batch, n_prompt, n_params, weight_bytes, decode, peak, bytes_per_s):
    """Explain the textbook's estimates; of the decode FLOPs, those of one token."""
    computing_s = 0.0
    if peak:
        effective = formulas.effective_flops_per_s(peak, Traced.named("eta", ETA))
        flops = formulas.prefill_flops_rough(batch, n_prompt, n_params)
        add("ttft_rough_s", flops / effective, "s", "9")
        computing_s = formulas.decode_flops_rough(batch, 1, n_params) / effective
    if decode:
        moving_s = formulas.tpot_floor_s(weight_bytes, bytes_per_s)
        if peak:
            computing_s = add("tpot_compute_rough_s", computing_s, "s", "9")
        moving_s = add("tpot_bandwidth_rough_s", moving_s, "s", "5")
        add("tpot_rough_s", loads.most(moving_s, computing_s), "s", "10")
