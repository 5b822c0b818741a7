"""What to change first, computed: the `advice` of a trace (TEXTBOOK, section 14).

Each lever is one prediction with one thing changed.  It gains if it fits, the
level that ranks takes a thousandth less time at least, and none takes longer;
what the numbers do not call a gain is listed apart, with its figures.  Time is
latency_exact_s, what a request takes, or the decode's where the GPU has no
matmul rate to time a prefill by.

The roofline ranks, not the expected level: it is worked from counts alone, and
what a profile says of two engines or formats may differ by less than its error.

Read `costmodel.levers` (what can be changed), then `advise`.
"""

from functools import partial

from costmodel.caching import LEVELS
from costmodel.experts import expected_share
from costmodel.levers import Lever, Request, levers, what_fits
from costmodel.profiles import gpu as gpu_profile
from costmodel.report import LEVEL_FIELDS
from costmodel.search import first_where

RANKED_BY = "roofline"
LEAST_SHARE = 0.001  # of the time: saving less is no gain, since every level leaves out more
LEVER_BATCH = 8


def _figures(request, prediction):
    """Level -> its times, and the tokens per second of all sequences together."""
    figures = {}
    for name in LEVELS:
        level = getattr(prediction, name)
        rate = level.tokens_per_s
        figures[name] = {field: getattr(level, field) for field in LEVEL_FIELDS}
        figures[name]["total_tokens_per_s"] = None if rate is None else request.batch * rate
    return figures


def _seconds(figures, n_output, whole):
    """What the request takes by a level's figures: all of it, or only its decode; None if that is not known."""
    if whole:
        return figures["latency_exact_s"]
    return None if figures["tpot_s"] is None else figures["tpot_s"] * (n_output - 1)


def _effect(lever):
    """Figures of a lever at every level, what it saves, and whether that is a gain."""
    prediction = lever.after.predict()
    before, levels = _figures(lever.before, lever.before.predict()), _figures(lever.after, prediction)
    whole = lever.before.peak is not None
    for name, figures in levels.items():
        was, is_ = [_seconds(f, lever.before.n_output, whole) for f in (before[name], figures)]
        known = None not in (was, is_)
        figures["saved_s"] = was - is_ if known else None
        figures["saved_share"] = (was - is_) / was if known else None
    saved = [figures["saved_s"] for figures in levels.values()]
    saved = [seconds for seconds in saved if seconds is not None]
    gains = prediction.fits and min(saved, default=-1) >= 0 and (levels[RANKED_BY]["saved_share"] or 0) >= LEAST_SHARE
    return {
        "lever": lever.name,
        "gain": gains,
        "fits": prediction.fits,
        "memory_bytes_needed": prediction.memory_bytes_needed,
        **levels,
    }


def _first(best, now):
    """Why the best lever comes first: the phase it saves most in, that phase's share of the time, and its bound."""
    before, after = now[RANKED_BY], best[RANKED_BY]
    phase, share, whole_s = "decode", None, before["latency_exact_s"]
    if whole_s is not None:
        if before["ttft_s"] - after["ttft_s"] > after["saved_s"] / 2:
            phase = "prefill"
        share = before["ttft_s"] / whole_s if phase == "prefill" else 1 - before["ttft_s"] / whole_s
    return {
        "lever": best["lever"],
        "saved_s": after["saved_s"],
        "saved_share": after["saved_share"],
        "phase": phase,
        "phase_share": share,
        "bound": before[f"{phase}_bound"],
    }


def _throughput(now):
    """A larger batch, which gains if more is done in a second, though each sequence may take longer.

    Of a model with experts, "expert_share" is the share that a step touches,
    now and then: what they weigh is read for more sequences, but more of it.
    """
    effect = _effect(Lever(f"batch {LEVER_BATCH}", now, now._replace(batch=LEVER_BATCH)))
    times = []
    for level in LEVELS:
        if effect[level]["saved_share"] is not None:
            times.append(LEVER_BATCH / now.batch / (1 - effect[level]["saved_share"]))
            effect[level]["throughput_factor"] = times[-1]
    if now.config.experts:
        effect["expert_share"] = [expected_share(now.config.experts, batch) for batch in (now.batch, LEVER_BATCH)]
    gains = effect["fits"] and min(times, default=0) >= 1
    return effect | {"gain": gains and effect[RANKED_BY]["throughput_factor"] >= 1 + LEAST_SHARE}


def _next_turn(now):
    """A session cache in the turn after this one, beside the same turn without.

    That turn's prompt: this one, its answer, and as many tokens again from the
    user.  Cached is all but the answer's last token, which was never forwarded.
    None without a rate to time it by, or where the model has no position for it.
    """
    turn = now._replace(n_prompt=2 * now.n_prompt + now.n_output)
    if not now.peak or turn.beyond_positions:
        return None
    session = Lever("session cache", turn, turn._replace(n_cached=now.n_prompt + now.n_output - 1))
    return {
        "prompt_tokens": turn.n_prompt,
        "n_cached": session.after.n_cached,
        "without": _figures(turn, turn.predict()),
        **_effect(session),
    }


def _phases(prediction, n_steps):
    """What bounds prefill and decode by each level, and their intensity as a multiple of the ridge."""
    phases = {"prefill": prediction.prefill} | ({"decode": prediction.decode} if n_steps else {})
    levels = {name: getattr(prediction, name) for name in LEVELS}
    return {
        name: {
            "bound": {level: getattr(of, f"{name}_bound") for level, of in levels.items()},
            "flops_per_byte": phase.intensity,
            "of_ridge": None if prediction.ridge is None else phase.intensity / prediction.ridge,
        }
        for name, phase in phases.items()
    }


def _decode_prevails(now, name, n_output):
    """Whether decoding `n_output` tokens takes as long as the prefill at least; None where a time is not known.

    Not by this request's TPOT: a longer answer has slower steps.
    """
    level = getattr(now._replace(n_output=n_output).predict(), name)
    if level is None or level.ttft_s is None:
        return None
    return level.tpot_s is not None and (n_output - 1) * level.tpot_s >= level.ttft_s


def _breakeven(now):
    """Level -> the first n_output whose decode takes as long as the prefill; None where that is not known."""
    return {
        name: None if _decode_prevails(now, name, 2) is None else first_where(partial(_decode_prevails, now, name), start=2)
        for name in LEVELS
    }


def advise(config, precision, gpu, n_prompt, n_output, batch=1, compute=None, engine="generic", n_gpus=1):
    """What dominates a request, what bounds it, and what each lever would change.

    Parameters
    ----------
    As for `predict`.

    Returns
    -------
    dict
        "fits" and, if not, "what_fits"; "first", the best lever and why, or None;
        "dominates" ("prefill", "decode", None where not known) and
        "breakeven_n_output" by level, the first whose decode takes as long as
        the prefill; "phases"; "now", the figures by level; "gains", ranked by time
        saved, and "no_gain"; "throughput", batch 8; "next_turn", a session
        cache; "left_out" with reasons.
    """
    now = Request(config, precision, gpu_profile(gpu), n_prompt, n_output, batch, 0, engine, n_gpus, compute)
    prediction = now.predict()
    figures, crossing = _figures(now, prediction), _breakeven(now)
    known = list(levers(now))
    left_out = [{"lever": lever.name, "why": lever.why_not} for lever in known if lever.after is None]
    effects = [_effect(lever) for lever in known if lever.after is not None]
    unknown = [effect for effect in effects if effect[RANKED_BY]["saved_s"] is None]
    left_out += [{"lever": effect["lever"], "why": "the profile lacks the rate to time it by"} for effect in unknown]
    next_turn = _next_turn(now)
    if now.peak and not next_turn:
        why = f"a next turn is longer than the {config.max_context} learned positions"
        left_out.append({"lever": "session cache", "why": why})
    gains = sorted([effect for effect in effects if effect["gain"]], key=lambda effect: -effect[RANKED_BY]["saved_s"])
    decodes = _decode_prevails(now, RANKED_BY, n_output)
    return {
        "gpu": now.gpu.name,
        "fits": prediction.fits,
        "memory_bytes_needed": prediction.memory_bytes_needed,
        "memory_bytes": prediction.gpu.memory_bytes,
        "max_context_tokens": prediction.max_context,
        "what_fits": None if prediction.fits else what_fits(now),
        "first": _first(gains[0], figures) if gains else None,
        "dominates": None if decodes is None else "decode" if decodes else "prefill",
        "breakeven_n_output": crossing,
        "ridge_flops_per_byte": prediction.ridge,
        "phases": _phases(prediction, n_output - 1),
        "ranked_by": RANKED_BY,
        "now": figures,
        "gains": gains,
        "no_gain": [effect for effect in effects if not effect["gain"] and effect not in unknown],
        "throughput": _throughput(now) if batch < LEVER_BATCH else None,
        "next_turn": next_turn,
        "left_out": left_out,
    }
