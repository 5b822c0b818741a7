"""Explanations and advice of a trace as text for a person."""

from common import rate, scaled, seconds, table

from costmodel.caching import LEVELS

WIDTH = 120  # a longer line is broken at its equals signs


def explained(lines):
    """One paragraph: name = formula = values = number, and where the formula is from; none for no lines."""
    parts, device = [], None
    for line in lines:
        if line["gpu"] != device:
            device = line["gpu"]
            parts.append(f"on {device}")
        value = f"{line['value']:,}" if isinstance(line["value"], int) else f"{line['value']:.6g}"
        source = line["section"] if line["section"].startswith("README") else f"section {line['section']}"
        steps = [line["expression"], line["values"], f"{value} {line['unit']}".rstrip() + f"  ({source})"]
        text = " = ".join([line["name"], *steps])
        parts.append(text if len(text) <= WIDTH else line["name"] + "".join([f"\n    = {step}" for step in steps]))
    return ["explained, sections of the textbook\n" + "\n".join(parts)] if parts else []


def advised(advice):
    """Paragraphs: what to do first and why, what bounds the request, and the table of levers."""
    parts = [f"advice, {advice['gpu']}: {_first(advice)}", "\n".join(_capacity(advice) + _phases(advice))]
    rows = _rows("now", advice["now"]) + [row for lever in advice["gains"] for row in _rows(lever["lever"], lever)]
    known = advice["now"][advice["ranked_by"]]["ttft_s"] is not None
    time = "latency is the exact one" if known else "without a TTFT, that of the decode"
    parts.append(f"levers, by time saved ({advice['ranked_by']}); {time}\n" + table(rows, _HEADERS))
    if advice["no_gain"]:
        rows = [row for lever in advice["no_gain"] for row in _rows(lever["lever"] + _room(lever), lever)]
        parts.append("no gain\n" + table(rows, _HEADERS))
    if advice["throughput"]:
        parts.append(_throughput(advice))
    turn = advice["next_turn"]
    if turn:
        rows = _rows("without", turn["without"]) + _rows(turn["lever"] + _room(turn), turn)
        text = f"next turn, of {turn['prompt_tokens']} tokens: this prompt, its answer, and as many tokens again from the user"
        parts.append(f"{text}; {turn['n_cached']} cached\n" + table(rows, _HEADERS))
    if advice["left_out"]:
        parts.append("\n".join([f"left out: {lever['lever']}, {lever['why']}" for lever in advice["left_out"]]))
    return parts


def _first(advice):
    first, needed = advice["first"], scaled(advice["memory_bytes_needed"], "B")
    if not advice["fits"]:
        fitting = [
            f"{fit['change']} ({scaled(fit['memory_bytes_needed'], 'B')} of {scaled(fit['memory_bytes'], 'B')})"
            for fit in advice["what_fits"]
        ]
        makes = f"what makes it fit: {', '.join(fitting)}" if fitting else "no single change here makes it fit"
        return f"it does not fit, {needed} needed of {scaled(advice['memory_bytes'], 'B')}; {makes}."
    if first is None:
        return "none of the levers below makes this request faster."
    share = "" if first["phase_share"] is None else f" takes {first['phase_share']:.0%} of the time and"
    return (
        f"{first['lever']} first: it saves {seconds(first['saved_s'])} ({first['saved_share']:.0%}), "
        f"because the {first['phase']}{share} is bound by {first['bound']}."
    )


def _capacity(advice):
    if advice["fits"]:
        return []
    longest = advice["max_context_tokens"]
    room = f"the longest context that fits is {longest:,} tokens" if longest else "there is no room for any token"
    return [f"bound by capacity: {room}; times are those of a device with more memory"]


def _phases(advice):
    lines = []
    for name, phase in advice["phases"].items():
        bounds = ", ".join([f"{bound or 'unknown'} ({level})" for level, bound in phase["bound"].items()])
        ridge = ""
        if phase["of_ridge"] is not None:
            ridge = f", {phase['of_ridge']:.3g} times the ridge of {advice['ridge_flops_per_byte']:.1f}"
        lines.append(f"{name}: {phase['flops_per_byte']:.1f} FLOP/B{ridge}; bound by {bounds}")
    crossing = advice["breakeven_n_output"][advice["ranked_by"]]
    if crossing is not None:
        overtakes = f"the decode takes longer than the prefill from {crossing:,} output tokens on"
        lines.append(f"{overtakes}; the {advice['dominates']} dominates here")
    return lines


def _throughput(advice):
    lever, level = advice["throughput"], advice["ranked_by"]
    factor = lever[level].get("throughput_factor")
    verdict = "not known without the missing rate"
    if factor is not None:
        verdict = f"{factor:.2f} times as much done in a second"
        verdict += "" if lever["gain"] else ", no gain" if lever["fits"] else " if it did fit"
    rows = _rows("now", advice["now"]) + _rows(lever["lever"] + _room(lever), lever)
    verdict += f", by the {level}"
    if "expert_share" in lever:
        verdict += "; a step touches {:.1%} of the experts now, then {:.1%}".format(*lever["expert_share"])
    return f"throughput, {lever['lever']}: {verdict}\n" + table(rows, _HEADERS)


_HEADERS = ("", "level", "TTFT", "TPOT", "latency", "tokens/s", "in total", "saved", "")


def _rows(name, levels):
    """A row for each level; latency is the exact one, which a single output token has too."""
    rows = []
    for level in LEVELS:
        figures = levels[level]
        saved, share = figures.get("saved_s"), figures.get("saved_share")
        rows.append(
            [
                "" if rows else name, level, *[seconds(figures[time]) for time in ("ttft_s", "tpot_s", "latency_exact_s")],
                rate(figures["tokens_per_s"]), rate(figures["total_tokens_per_s"]),
                "" if saved is None else f"-{seconds(-saved)}" if saved < 0 else seconds(saved),
                "" if share is None else f"{share:.1%}",
            ]
        )  # fmt: skip
    return rows


def _room(lever):
    return "" if lever["fits"] else " (does not fit)"
