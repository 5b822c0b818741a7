"""The chapter's claims on reuse: sections 11 to 13, counted in shape-only runs of the caches."""

from functools import lru_cache

from costmodel import formulas
from costmodel.textbook_rows import FP16, example, milliseconds, over, row
from npinfer import PrefixCache, PromptCache, SessionCache, Transformer

N_SYSTEM, N_USER = 1200, 200  # section 12.1
FIRST_TURN, TURN, N_TURNS = 800, 400, 6  # section 13


@lru_cache(maxsize=1)
def _model():
    return Transformer.shape_only(example().config)


@lru_cache(maxsize=1)
def _prefix_report():
    """Report of a system prompt's cache on a prompt that goes on from it."""
    cache = PrefixCache(_model())
    cache.add(range(N_SYSTEM))
    with cache.prefill(range(N_SYSTEM + N_USER)) as start:
        return start.report


def system_prompt(setting):
    report, config = _prefix_report(), example().config
    whole = formulas.forward_counts(config, FP16, 1, 0, N_SYSTEM + N_USER)
    return [
        row("tokens prefilled behind the system prompt", "tokens", "only the user part", N_USER, report.n_computed,
            f"system {N_SYSTEM}, user {N_USER}; counted in a run of the prefix cache"),
        row("KV loaded for it", "B", "the system prompt's", N_SYSTEM * 128 * 1024, report.bytes_loaded, "1200 x 128 KiB"),
        row("FLOPs avoided", "TFLOP", None,
            formulas.prefill_flops_rough(1, N_SYSTEM, formulas.n_streamed_parameters(config)) / 1e12,
                report.flops_saved / 1e12,
            f"of {whole.matmul_flops / 1e12:.2f}, masked pairs included; the head runs once either way"),
    ]  # fmt: skip


def prefix_sharing(setting):
    cold, warm = [
        formulas.forward_counts(setting.config, FP16, 1, n_cached, N_SYSTEM + N_USER - n_cached) for n_cached in (0, N_SYSTEM)
    ]
    times = [setting.floor(N_SYSTEM + N_USER, n_cached=n_cached).ttft_s for n_cached in (0, N_SYSTEM)]
    formula = formulas.prefix_saving(N_SYSTEM, N_USER)
    bound = setting.floor(N_SYSTEM + N_USER, n_cached=N_SYSTEM).prefill_bound
    verdict = {"bandwidth": "one pass over the weights bounds the warm one", "compute": "both are bound by compute"}
    return [
        row("share of the prefill's cost that is left", "", "about 1/7", formula, warm.needed_flops / cold.needed_flops,
            "of the needed FLOPs: the user part still attends to the prefix, and the head runs once either way"),
        row("share of TTFT", "", "about 1/7", formula, over(times[1], times[0]),
            f"the floor on {setting.gpu.name}, {f'where {verdict[bound]}' if bound else 'whose matmul rate is not known'}"),
        row("least share: one pass over the weights", "", None, None, over(setting.weights_s, times[0]),
            "however much is cached"),
    ]  # fmt: skip


def prompt_cache(setting):
    """Two documents in either order: only one of the orders is a prefix."""
    first, second, question = list(range(256)), list(range(1000, 1256)), [5] * 16
    prefixes = PrefixCache(_model())
    prefixes.add(first + second)
    exact, anywhere = PromptCache(_model()), PromptCache(_model(), segments=True)
    rows = []
    for cache in (exact, anywhere):
        cache.prefill(first + second).release()
    for name, cache in (("prefix cache", prefixes), ("prompt cache", exact), ("cache of segments", anywhere)):
        for order, prompt in (("same", first + second), ("swapped", second + first)):
            with cache.prefill(prompt + question) as start:
                report = start.report
            claim = "any segment" if cache is anywhere else None
            same = order == "same" or cache is anywhere
            note = "an approximation above the first layer" if report.approximate else ""
            rows.append(row(f"reused, {name}, {order} order", "tokens", claim, len(prompt) if same else 0,
                            report.n_reused, note))
    return rows


def session_cache(setting):
    session = SessionCache(_model()).session("reader")
    rows, held = [], 0
    for turn in range(1, N_TURNS + 1):
        n_prompt = FIRST_TURN + TURN * (turn - 1)
        report = session.prefill(range(n_prompt)).report
        rows.append(row(f"prompt of turn {turn}", "tokens", n_prompt, n_prompt, report.n_asked,
                        f"{report.n_computed} of them computed"))
        cold, warm = [setting.floor(n_prompt, n_cached=n).ttft_s for n in (0, report.n_reused)]
        rows.append(row(f"TTFT of turn {turn} without a cache", "ms", "grows turn by turn",
                        milliseconds(setting.rough_prefill_s(n_prompt)), milliseconds(cold)))
        flat = setting.rough_prefill_s(n_prompt - held)
        rows.append(row(f"TTFT of turn {turn} with a session cache", "ms", "stays flat", milliseconds(flat),
                        milliseconds(warm), "new tokens attend to a longer history" if held else "nothing to reuse yet"))
        held = n_prompt
    return rows
