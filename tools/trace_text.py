"""The report of a trace as text for a person; numbers are scaled here and nowhere else."""

from common import rate, scaled, seconds, table

from costmodel.caching import LEVELS

COUNTS = {
    "matmul_flops": "matmul",
    "masked_flops": "masked of it",
    "elementwise_flops": "elementwise",
    "weight_bytes_read": "weights read",
    "kv_bytes_read": "KV read",
    "kv_bytes_written": "KV written",
    "activation_bytes_read": "act. read",
    "activation_bytes_written": "act. written",
    "score_bytes_read": "scores read",
    "score_bytes_written": "scores written",
}


def as_text(result, detail):
    """The report of `costmodel.report.trace` as aligned text."""
    parts = [headline(result), table(*counts(result, detail)), table(*predictions(result))]
    parts += [prefix(result)] if result["prefix"] else []
    parts += [session(result)] if result["session"] else []
    if result["explain"] or result["advice"]:
        import advice_text

        parts += advice_text.explained(result["explain"] or [])
        parts += [part for advice in (result["advice"] or {}).values() for part in advice_text.advised(advice)]
    parts += notes(result)
    return "\n\n".join(parts)


def headline(result):
    model, request, precision, memory = (result[key] for key in ("model", "request", "precision", "memory"))
    choice = f", {sampler(request['sampler'])}" if "sampler" in request else ""
    lines = [
        f"{model['name']} ({result['mode']}): {model['n_layers']} layers, d_model {model['d_model']}, {heads(model)}, "
        f"{mlp(model)}, vocab {model['vocab_size']}{window(model)}",
        f"prompt {request['prompt_tokens']}, output {request['output_tokens']}, batch {request['batch']}{choice}; "
        f"weights {precision['weights']}{otherwise(precision)}, KV {precision['kv']}, activations {precision['activations']}",
    ]
    if isinstance(result["experts_touched"], str):
        read = {"all": "all", "expected": "as many as tokens that choose evenly are expected to"}[result["experts_touched"]]
        lines.append(f"no tokens choose experts here: a forward reads {read}")
    context = request["prompt_tokens"] + request["output_tokens"]
    if model["max_context"] and context > model["max_context"]:
        lines.append(f"beyond the {model['max_context']} positions this model was trained for")
    used, streamed = f"{model['n_streamed_parameters']:,} read by a step", scaled(memory["weight_bytes_streamed"], "B")
    if "experts" in model:
        used = f"{model['n_active_parameters']:,} used by a token"
    step = "a token's step" if "experts" in model else "a step"
    rows = [
        ("parameters", f"{model['n_parameters']:,}", used),
        ("weights", scaled(memory["weight_bytes_resident"], "B"), f"{streamed} read by {step}"),
        ("KV cache", scaled(memory["kv_bytes"], "B"), f"{memory['kv_bytes_per_token']:,} B per token"),
    ]
    measured = result["measured"]
    if measured:
        rows.append(("measured", f"TTFT {seconds(measured['ttft_s'])}", f"TPOT {seconds(measured['tpot_s'])}"))
        rows.append(("", f"peak {scaled(measured['peak_memory_bytes'], 'B')}", "of memory"))
        rows += logits_error(measured)
    return "\n".join(lines) + "\n\n" + table(rows)


def heads(model):
    """Heads, and what they share: KV heads, or a latent and one rotated part of the key."""
    if "latent" in model:
        latent = model["latent"]
        return f"{model['n_heads']} heads of {model['head_dim']}, latent of {latent['kv_rank']} + {latent['rope_dim']}"
    return f"{model['n_heads']} heads, {model['n_kv_heads']} KV heads of {model['head_dim']}"


def mlp(model):
    """Inner width, or experts and the layers that have none."""
    if "experts" not in model:
        return f"d_ff {model['d_ff']}"
    experts = model["experts"]
    text = f"{experts['n_experts']} experts of {experts['d_ff']}, {experts['n_active']} active"
    text += f" + {experts['n_shared']} shared" if experts["n_shared"] else ""
    n_dense = len([layer for layer in experts["dense_layers"] if layer < model["n_layers"]])
    return text + (f", {n_dense} layers of d_ff {model['d_ff']}" if n_dense else "")


def window(model):
    """The window, and how many layers have it if not all do."""
    if not model["sliding_window"]:
        return ""
    pattern, n_layers = model.get("window_pattern", [True]), model["n_layers"]
    n_local = sum([pattern[layer % len(pattern)] for layer in range(n_layers)])
    some = "" if n_local == n_layers else f" in {n_local} of {n_layers} layers"
    return f", window {model['sliding_window']}{some}"


def sampler(settings):
    """How tokens are drawn."""
    top_k = f", top-k {settings['top_k']}" if settings["top_k"] else ""
    return f"drawn at temperature {settings['temperature']:g}{top_k}, top-p {settings['top_p']:g}"


def otherwise(precision):
    """Formats beside the one that most weights have."""
    if "bits_per_weight" in precision:
        return f" (matrices {precision['bits_per_weight']:g} bits)"
    others = sorted({format_ for *_, format_ in precision.get("exceptions", [])})
    return f" (some {', '.join(others)})" if others else ""


def logits_error(measured):
    """Rows of what the formats cost in accuracy, if that was asked for."""
    error = measured.get("logits_error")
    if error is None:
        return []
    relative = "-" if error["relative_rms"] is None else f"{error['relative_rms']:.3%}"
    return [
        ("logits error", f"RMS {error['rms']:.3g}, {relative}", f"largest {error['largest']:.3g}"),
        ("", f"same choice {error['same_choice']:.2%}", f"divergence {error['divergence_nats']:.3g} nats"),
    ]


def counts(result, detail):
    """Rows of counts, one for each operation, layer or step, or one column for each phase; and the headers."""
    if detail == "phase":
        n_steps = result["request"]["output_tokens"] - 1
        phases = [("prefill", result["counts"]["prefill"]), (f"decode, {n_steps} steps", result["counts"]["decode"])]
        phases = phases if n_steps else phases[:1]
        rows = [[name, *[scaled(counts[field], _unit(field)) for _, counts in phases]] for field, name in COUNTS.items()]
        return rows, ["counts", *[name for name, _ in phases]]
    if detail == "op":
        lines = [([row["phase"], row["op"], row["calls"]], row) for row in result["operations"]]
        names = ["phase", "operation", "calls"]
    elif detail == "layer":
        lines = [([row["phase"], "-" if row["layer"] is None else row["layer"]], row) for row in result["layers"]]
        names = ["phase", "layer"]
    else:
        lines = [([row["phase"], row["step"]], row) for row in result["steps"]]
        names = ["phase", "step"]
    columns = [field for field in COUNTS if any(row[field] for _, row in lines)]
    rows = [[*start, *[scaled(row[field], _unit(field)) for field in columns]] for start, row in lines]
    return rows, names + [COUNTS[field] for field in columns]


def _unit(field):
    return "FLOP" if field.endswith("_flops") else "B"


def predictions(result):
    """Rows of what is predicted, one column for each GPU; and the headers."""
    gpus = result["predictions"]
    rows = []
    for level in LEVELS:
        if not any(gpu[level] for gpu in gpus):
            continue
        for quantity, show in (
            ("ttft_s", seconds), ("tpot_s", seconds), ("latency_s", seconds), ("tokens_per_s", rate),
        ):  # fmt: skip
            label = level if quantity == "ttft_s" else ""
            rows.append([label, _NAMES[quantity], *[show(gpu[level][quantity]) for gpu in gpus]])
            if level == "expected" and quantity in ("ttft_s", "tpot_s"):
                rows.append(["", "8 of 10 within", *[_range(gpu[level][quantity.replace("_s", "_range_s")]) for gpu in gpus]])
                compared = [_measured(result, gpu[level], quantity) for gpu in gpus]
                rows += [["", "measured here", *compared]] if set(compared) != {"-"} else []
        rows.append(["", "bound by", *[_bounds(gpu[level]) for gpu in gpus]])
    for quantity in ("ttft_s", "tpot_s"):
        label = f"rough, eta {gpus[0]['rough']['eta']}" if quantity == "ttft_s" else ""
        rows.append([label, _NAMES[quantity], *[seconds(gpu["rough"][quantity]) for gpu in gpus]])
    rows.append(["intensity", "prefill, decode", *[_intensity(gpu) for gpu in gpus]])
    rows.append(["", "ridge", *[_per_byte(gpu["ridge_flops_per_byte"]) for gpu in gpus]])
    rows.append(["memory", "needed", *[f"{scaled(gpu['memory_bytes_needed'], 'B')} of {scaled(gpu['memory_bytes'], 'B')}" for gpu in gpus]])
    rows.append(["", "longest context", *[_context(gpu) for gpu in gpus]])
    return rows, ["level", "", *[_device(gpu) for gpu in gpus]]


def _measured(result, expected, quantity):
    """What a numeric run took, beside what its own engine was expected to take: for fp32, which is what NumPy computes in."""
    measured = result["measured"]
    formats = {result["precision"][field] for field in ("weights", "kv", "activations")}
    own = expected["basis"]["engine"] == "npinfer" and formats == {"fp32"}
    if not measured or not own or None in (measured[quantity], expected[quantity]):
        return "-"
    return f"{seconds(measured[quantity])}, {measured[quantity] / expected[quantity]:.2f} times"


def _device(gpu):
    return gpu["gpu"] if gpu["n_gpus"] == 1 else f"{gpu['n_gpus']} x {gpu['gpu']}"


_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "latency_s": "latency", "tokens_per_s": "tokens/s"}


def _range(span):
    return "-" if span is None else f"{seconds(span[0])} to {seconds(span[1])}"


def _bounds(level):
    return ", ".join(level[phase] or "-" for phase in ("prefill_bound", "decode_bound"))


def _per_byte(value):
    return "-" if value is None else f"{value:.1f} FLOP/B"


def _intensity(gpu):
    phases = [gpu["prefill_flops_per_byte"], gpu["decode_flops_per_byte"]]
    return ", ".join("-" if value is None else f"{value:.1f}" for value in phases) + " FLOP/B"


def _context(gpu):
    longest = gpu["max_context_tokens"]
    return "any" if longest is None else f"{longest:,} tokens" if longest else "none"


def prefix(result):
    """What a cached prefix saves: shares of the work, and TTFT by GPU and level."""
    saving = result["prefix"]
    rows = [
        [name, scaled(saving["cold"][field], _unit(field)), scaled(saving["warm"][field], _unit(field))]
        for name, field in (("matmul", "matmul_flops"), ("weights read", "weight_bytes_read"), ("KV read", "kv_bytes_read"))
    ]
    for gpu, levels in saving["ttft_s_by_gpu"].items():
        for level, times in levels.items():
            if times is not None:
                rows.append([f"TTFT {level}, {gpu}", seconds(times["cold"]), seconds(times["warm"])])
    text = (
        f"prefix of {saving['prefix_tokens']} cached: {saving['n_computed']} tokens computed, "
        f"{saving['needed_flops_share']:.4f} of the needed FLOPs (the textbook's share {saving['textbook_share']:.4f})"
    )
    return text + "\n" + table(rows, ["", "cold", "warm"])


def session(result):
    """What a session cache saves, turn by turn."""
    rows = []
    for turn in result["session"]:
        row = [turn["turn"], turn["prompt_tokens"], turn["n_reused"], turn["n_computed"]]
        row += [scaled(turn[run]["matmul_flops"], "FLOP") for run in ("cold", "warm")]
        for levels in turn["ttft_s_by_gpu"].values():
            row += [seconds(levels["roofline"][run]) for run in ("cold", "warm")]
        rows.append(row)
    headers = ["turn", "prompt", "reused", "computed", "cold", "warm"]
    for gpu in result["session"][0]["ttft_s_by_gpu"]:
        headers += [f"TTFT cold, {gpu}", "warm"]
    return "session, TTFT by the roofline\n" + table(rows, headers)


def basis(basis):
    """What the expected level stands on, in a line."""
    known = [
        f"{basis['error_' + phase]:.1%} over {basis['rows_' + phase]} measurements of {phase}"
        for phase in ("prefill", "decode")
        if basis["rows_" + phase]
    ]
    stands = "median error " + ", ".join(known) if known else "not among the measurements"
    return f"expected: engine {basis['engine']}, {stands}"


def notes(result):
    """Paragraphs on what a reader must know before using the numbers."""
    agrees = "agree" if result["closed_form"]["agrees"] else "DISAGREE: this is a fault of the program, please report it"
    lines = [f"ledger and closed form {agrees}"]
    lines += dict.fromkeys([basis(gpu["expected"]["basis"]) for gpu in result["predictions"]])
    for gpu in result["predictions"]:
        if not gpu["fits"]:
            lines.append(
                f"{gpu['gpu']}: does not fit, {scaled(gpu['memory_bytes_needed'], 'B')} needed of "
                f"{scaled(gpu['memory_bytes'], 'B')}; times are those of a device with more memory"
            )
        if gpu["missing_rates"]:
            lines.append(f"{gpu['gpu']}: the profile lacks {', '.join(gpu['missing_rates'])}; the terms are left out")
        if gpu["floor_applies"] is False:
            lines.append(f"{gpu['gpu']}: a step's weights may stay in the last-level cache; the bandwidth floor does not apply")
    return ["\n".join(lines)]
