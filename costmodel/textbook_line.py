"""The chapter's claims on latency and throughput: sections 6 to 8, 14 and 15."""

from costmodel import formulas
from costmodel import line as lines
from costmodel.textbook_costs import LENGTHS
from costmodel.textbook_rows import FP16, N_OUTPUT, N_PROMPT, aside, milliseconds, over, row
from npinfer import Precision

SWEEP = [N_OUTPUT * 2**i for i in range(5)]
B_S, K_S, SHORT, LONG = 0.3, 0.01, 80, 400  # section 7's example
EXCESS = 0.1


def line(setting):
    config, gpu = setting.config, setting.gpu
    ttft_s = setting.floor().ttft_s
    fit = lines.latency_line(config, FP16, gpu, N_PROMPT, SWEEP)
    b_s, k_s, r2, bend = (None,) * 4 if fit is None else fit
    bends = lines.bend_n_context(config, FP16, gpu, N_PROMPT, EXCESS)
    return [
        row("b", "ms", "from the prefill", milliseconds(ttft_s), milliseconds(b_s),
            f"fit over {SWEEP[0]} to {SWEEP[-1]} tokens; formula: TTFT; the first token is the prefill's, the bend lowers b"),
        row("k", "ms", "for each output token", milliseconds(setting.weights_s), milliseconds(k_s),
            "formula: TPOT_min without KV"),
        row("r2 of the fit", "", "a line", 1, r2, "" if r2 is None else f"1 - {1 - r2:.1e}"),
        row("b / k", "", "often more than ten", over(ttft_s, setting.weights_s), over(b_s, k_s),
            f"prompt of {N_PROMPT}, see below"),
        row("last step of the sweep / first, less 1", "", None, 0, bend,
            "each step reads one more token's KV than the one before"),
        row("context from which a step takes 10 % longer", "tokens", None, _bend_by_weights(setting), bends,
            f"than the first after {N_PROMPT}; formula: 10 % of the weights' bytes as KV"
            + aside(config, latent="; a step expands every cached latent, which takes FLOPs")),
        row("prompt from which b exceeds 10 k", "tokens", None, _ten_k(setting),
            lines.breakeven_n_prompt(config, FP16, gpu),
            f"floors of {gpu.name}; formula: 2*L*P FLOPs against 10 passes over the weights"),
        *_ttft_rows(setting),
    ]  # fmt: skip


def _bend_by_weights(setting):
    weights = formulas.weight_bytes(setting.config, FP16, streamed=True)
    return N_PROMPT + EXCESS * weights / formulas.kv_bytes_per_token(setting.config, FP16)


def _ten_k(setting):
    a_token_s = setting.rough_prefill_s(1)
    return None if a_token_s is None else 10 * setting.weights_s / a_token_s


def _ttft_rows(setting):
    config = setting.config
    rows = [
        row(f"TTFT, L = {n_prompt}", "ms", "nearly linear in L", milliseconds(setting.rough_prefill_s(n_prompt)),
            milliseconds(setting.floor(n_prompt).ttft_s), _ttft_note(setting, n_prompt))
        for n_prompt in LENGTHS
    ]  # fmt: skip
    width = config.n_heads * (config.head_dim + config.value_dim) / 2  # of queries and keys, and of values
    by_parameters = EXCESS * formulas.n_token_parameters(config) / (config.n_layers * width)
    rows.append(row("prompt from which attention adds 10 %", "tokens", None, by_parameters,
                    lines.attention_n_prompt(config, EXCESS), "to the projections' FLOPs; formula: P with the head in it"))  # fmt: skip
    return rows


def _ttft_note(setting, n_prompt):
    if setting.floor(n_prompt).prefill_bound == "bandwidth":
        return "one pass over the weights is the floor"
    flops = lines.prefill_flops(setting.config, n_prompt)
    return f"attention adds {flops.attention / flops.projections:.1%} to the linear part"


def chain_of_thought(setting):
    rows = []
    for x in (SHORT, LONG):
        exact_s = formulas.latency_exact_s(B_S, K_S, x)
        rows.append(row(f"latency, b = 300 ms, k = 10 ms, x = {x}", "ms", {SHORT: 1100, LONG: 4300}[x],
                        1e3 * formulas.latency_s(B_S, K_S, x), 1e3 * exact_s,
                        "b gives the first token: x - 1 steps"))  # fmt: skip
    short, long = rows
    rows.append(row(f"latency of x = {LONG} / of x = {SHORT}", "", 3.91, long.formula / short.formula,
                    long.exact / short.exact, "tends to 5 where b is small beside k*x"))  # fmt: skip
    for x, latency in zip((SHORT, LONG), rows[:2]):
        rows.append(row(f"TPS, x = {x}", "tokens/s", None, formulas.tokens_per_s(B_S, K_S, x), x / latency.exact * 1e3))
    ttft_s, tpot_s = setting.floor().ttft_s, setting.floor().tpot_s
    for x in (N_OUTPUT, 5 * N_OUTPUT):
        level = setting.floor(n_output=x)
        known = ttft_s is not None
        rows.append(row(f"latency, predicted, x = {x}", "ms", None,
                        1e3 * formulas.latency_s(ttft_s, tpot_s, x) if known else None, milliseconds(level.latency_exact_s),
                        f"{setting.gpu.name}; formula: TPOT of {N_OUTPUT} tokens"))  # fmt: skip
        rows.append(row(f"TPS, predicted, x = {x}", "tokens/s", None,
                        formulas.tokens_per_s(ttft_s, tpot_s, x) if known else None,
                        over(x, level.latency_exact_s)))  # fmt: skip
    return rows


def throughput(setting):
    """TPS against N; one token has no TPOT, and so no rate."""
    rows = []
    for n_output in (1, 10, 100, 1000, 10_000):
        level = setting.floor(n_output=n_output)
        known = level.ttft_s is not None and level.tpot_s is not None
        limits = "one token has no TPOT" if n_output == 1 else "a rate is missing"
        if known:
            limits = f"limits: N/TTFT {n_output / level.ttft_s:,.2f}, 1/TPOT {1 / level.tpot_s:.2f}"
        rows.append(row(f"TPS, N = {n_output:,}", "tokens/s", "N / (TTFT + TPOT*N)", level.tokens_per_s,
                        over(n_output, level.latency_exact_s) if known else None, limits))  # fmt: skip
    level = setting.floor()
    rows += [
        row("slope for small N", "tokens/s", "N / TTFT", over(1, setting.rough_prefill_s(N_PROMPT)), over(1, level.ttft_s),
            f"at N = 1, {setting.gpu.name}"),
        row("limit for large N", "tokens/s", "1 / TPOT", 1 / setting.weights_s, 1 / level.tpot_s,
            f"TPOT of {N_OUTPUT} tokens; it falls as the context grows, so TPS has a maximum"),
    ]  # fmt: skip
    return rows


def dominance(setting):
    level, chapter_s = setting.floor(), setting.rough_prefill_s(N_PROMPT)
    known = level.ttft_s is not None
    rows = [
        row("output for which both phases take as long", "tokens", None,
            formulas.breakeven_n_output(chapter_s, setting.weights_s) if known else None,
            1 + formulas.breakeven_n_output(level.ttft_s, level.tpot_s) if known else None,
            f"{setting.gpu.name}, TTFT / TPOT; for fewer TTFT dominates; exact: and the token that the prefill gives"),
    ]  # fmt: skip
    for n_output, claim in ((2, "small N: TTFT dominates"), (10 * N_OUTPUT, "large N: TPOT dominates")):
        times = setting.floor(n_output=n_output)
        share = chapter_s / formulas.latency_s(chapter_s, setting.weights_s, n_output) if known else None
        rows.append(row(f"share of the prefill, N = {n_output}", "", claim, share, over(times.ttft_s, times.latency_exact_s),
                        f"in the latency on {setting.gpu.name}"))  # fmt: skip
    half = setting.floor(N_PROMPT // 2)
    int8 = setting.floor(precision=Precision(weights="int8"))
    rows += [
        row("TTFT of half the prompt / of the whole", "", "shorten prompts", 0.5, over(half.ttft_s, level.ttft_s),
            "one pass over the weights is the floor; attention falls with the square"),
        row("TPOT with int8 weights / fp16", "", "quantise weights", 0.5, int8.tpot_s / level.tpot_s,
            "the KV cache is read in fp16 as before"),
    ]  # fmt: skip
    return rows


def summary(setting):
    level = setting.floor()
    known = level.ttft_s is not None
    cold, warm = level.ttft_s, setting.floor(n_cached=N_PROMPT // 2).ttft_s
    return [
        row(f"latency of {N_OUTPUT} tokens", "ms", "b + k*x",
            1e3 * formulas.latency_s(setting.rough_prefill_s(N_PROMPT), setting.weights_s, N_OUTPUT) if known else None,
            milliseconds(level.latency_exact_s), f"{setting.gpu.name}; formula: 2*B*L*P at the peak, and the weights alone"),
        row("floor of a decode step", "ms", "bytes / bandwidth", milliseconds(setting.weights_s), milliseconds(level.tpot_s)),
        row("TTFT with half the prompt cached / without", "", "caches avoid repeated prefill", 0.5, over(warm, cold),
            "what is new still attends to what is cached"),
    ]  # fmt: skip
