"""The chapter's claims on counts and floors: sections 0 to 5, 9 and 10."""

import numpy as np

from costmodel import formulas, line, recompute
from costmodel.profiles import gpu
from costmodel.textbook_rows import FP16, N_OUTPUT, N_PROMPT, aside, example, milliseconds, over, row, run_of, shape_only
from npinfer import Ledger, ModelConfig, Precision, Transformer, generate
from npinfer.generate import no_tokens

SMALL = ModelConfig(n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=128, vocab_size=256)
FP32 = Precision("fp32", "fp32", "fp32")
LENGTHS = (128, 1024, 8192, 32768)  # prompts to hold 2*B*L*P to
KIB = 1024


def two_phases(setting):
    times = setting.floor()
    note = f"eta * peak for the formula, the floor of {setting.gpu.name} for the exact; {N_PROMPT} prompt tokens"
    return [
        row("TTFT", "ms", "set by the prefill", milliseconds(setting.rough_prefill_s(N_PROMPT, setting.eta)),
            milliseconds(times.ttft_s), note),
        row("TPOT", "ms", "set by decoding", milliseconds(setting.weights_s), milliseconds(times.tpot_s),
            "a step also reads the KV cache, of 1,050 tokens in the mean"),
        *_learned_positions(setting.config),
    ]  # fmt: skip


def _learned_positions(config):
    """A row on the end of a table of positions: it is not the end of the chapter."""
    if not config.learned_positions:
        return []
    return [row("positions that the model has learned", "tokens", None, None, config.max_context,
                "rows of longer contexts are of the same shape with a longer table")]  # fmt: skip


def autoregression(setting):
    forwards = run_of(setting.config).forwards
    one_by_one = formulas.decode_counts_total(setting.config, FP16, 1, 1, N_PROMPT + 1).weight_bytes_read
    at_once = formulas.forward_counts(setting.config, FP16, 1, 0, N_PROMPT).weight_bytes_read
    return [
        row(f"forwards for {N_OUTPUT} tokens", "forwards", "one after another", N_OUTPUT, len(forwards),
            "counted in a run: the prefill gives the first token, each other needs a decode step"),
        row(f"weights read, {N_PROMPT} tokens singly / at once", "", "parallel within a forward",
            N_PROMPT, one_by_one / at_once, "one pass over the weights serves all positions, embedding rows apart"
            + aside(setting.config, experts="; many tokens touch more experts than one")),
    ]  # fmt: skip


def linear_layer(setting):
    config = example().config
    d = config.d_model
    ledger = run_of(config)
    q_proj = ledger.total(phase="decode", op="q_proj", layer=0, forward=1)
    step = ledger.total(forward=1)
    return [
        row(f"weights of a d x d layer, d = {d}", "elements", "d^2", d**2, q_proj.weight_bytes_read // 2,
            "q_proj of the chapter's model, from a run"),
        row("FLOPs on one token", "FLOP", "2*d^2", 2 * d**2, q_proj.matmul_flops),
        row("FLOPs of a step for each weight it reads", "", 2, 2,
            step.needed_flops / formulas.n_streamed_parameters(config),
            f"the rest is attention to {N_PROMPT + 1:,} tokens, which has no weights"),
    ]  # fmt: skip


def kv_cache(setting):
    config, per_token = setting.config, formulas.kv_bytes_per_token(setting.config, FP16)
    cached = run_of(config)
    with Ledger() as recomputed:
        recompute.generate_without_cache(shape_only(config), no_tokens((1, N_PROMPT)), N_OUTPUT)
    without, with_ = [ledger.total().kv_bytes_written // per_token for ledger in (recomputed, cached)]
    history = sum(range(N_PROMPT, N_PROMPT + N_OUTPUT))
    once = N_PROMPT + N_OUTPUT - 1
    flops = [ledger.total().needed_flops for ledger in (recomputed, cached)]
    return [
        row("K and V rows computed without a cache", "tokens", "the whole history each time", history, without,
            f"counted in a run of {N_PROMPT} + {N_OUTPUT} tokens that recomputes the history"),
        row("K and V rows computed with it", "tokens", "only the token's own", once, with_,
            "the last token is never forwarded"),
        row("KV bytes that decoding reads", "B", "the history is still read",
            (N_OUTPUT - 1) * formulas.kv_bytes_read(config, FP16, N_PROMPT + N_OUTPUT // 2),
            cached.total(phase="decode").kv_bytes_read),
        row("FLOPs without a cache / with it", "", None, history / once, flops[0] / flops[1],
            "formula: linear layers at every position; the head runs for one position of a forward, attention is added"
            + aside(config, latent="; every step expands all latents")),
        *_growth(config),
        _equal_tokens(),
    ]  # fmt: skip


def _growth(config):
    """Rows on how FLOPs without a cache grow with the output: by the square in the linear layers."""
    rows = []
    for n in (N_OUTPUT, 100 * N_OUTPUT):
        linear = (2 * n * N_PROMPT + n * (2 * n - 1)) / (n * N_PROMPT + n * (n - 1) / 2)
        rows.append(row(f"FLOPs of {2 * n:,} tokens / of {n:,}, no cache", "", None, linear,
                        recompute.recompute_doubling_ratio(config, N_PROMPT, n),
                        "2 is linear, 4 the square of the length; attention adds a cube"))  # fmt: skip
    rows.append(row("output from which the square prevails", "tokens", None, 2 * N_PROMPT - 1,
                    recompute.recompute_quadratic_n_output(config, N_PROMPT),
                    f"doubling it takes 3 times the FLOPs; a prompt of {N_PROMPT}; formula: linear layers alone"))  # fmt: skip
    return rows


def _equal_tokens(n_prompt=8, n_output=12):
    """The same generation of a small model both ways, computed."""
    model = Transformer.random(SMALL, seed=0, precision=FP32)
    prompt = np.arange(n_prompt)[None]
    with_cache = generate(model, prompt, n_output).tokens
    without = recompute.generate_without_cache(model, prompt, n_output)
    equal = int((with_cache == without).sum())
    return row("equal tokens with and without, small model", "tokens", None, n_output, equal, "computed on real arrays")


def bounds(setting):
    prediction = setting.predict()
    bytes_per_weight = FP16.weights.bits // 8
    per_token = 2 / bytes_per_weight
    verdicts = [
        "no rate" if prediction.ridge is None else f"{'above' if phase.intensity > prediction.ridge else 'below'} the ridge"
        for phase in (prediction.prefill, prediction.decode)
    ]
    first = None if prediction.ridge is None else prediction.ridge / per_token
    spread = aside(setting.config, experts="; an expert serves only the tokens that choose it")
    return [
        row(f"intensity of a prefill of {N_PROMPT} tokens", "FLOP/B", "compute-bound", per_token * N_PROMPT,
            prediction.prefill.intensity, f"{verdicts[0]}; KV and embedding rows are moved besides the weights{spread}"),
        row("intensity of decoding", "FLOP/B", "bandwidth-bound", per_token, prediction.decode.intensity,
            verdicts[1] + aside(setting.config, latent="; a step expands every cached latent")),
        row("ridge", "FLOP/B", None, over(setting.peak, setting.gpu.memory_bytes_per_s),
            prediction.ridge, f"peak / bandwidth of {setting.gpu.name}"),
        row("prompt from which prefill is compute-bound", "tokens", None, first,
            line.compute_bound_n_prompt(setting.config, FP16, setting.gpu),
            f"the rule of thumb fails for shorter prompts{spread}"),
    ]  # fmt: skip


def weight_bytes(setting):
    config = example().config
    cache = setting.gpu.last_level_cache_bytes
    return [
        row("parameters that a step reads", "1e9", 7.111, formulas.n_streamed_parameters(config) / 1e9,
            (formulas.n_parameters(config) - config.vocab_size * config.d_model) / 1e9,
            f"exact: all {formulas.n_parameters(config):,} less the input embedding, of which a token looks up one row"),
        row("weight bytes", "GB", 14.2, 7.111 * 2, formulas.weight_bytes(config, FP16, streamed=True) / 1e9),
        row("last-level cache", "MB", "tens of MB", None, None if cache is None else cache / 1e6,
            _cache_note(setting)),
    ]  # fmt: skip


def _streamed(setting):
    return formulas.weight_bytes(setting.config, FP16, streamed=True)


def _cache_note(setting):
    cache = setting.gpu.last_level_cache_bytes
    known = "not in the profile" if cache is None else f"a step streams {_streamed(setting) / cache:,.1f} times as much"
    return f"{setting.gpu.name}: {known}"


def kv_bytes(setting):
    config = example().config
    weights = formulas.weight_bytes(config, FP16, streamed=True)
    step = run_of(config).total(forward=1)
    elements = formulas.kv_elements_per_token(config)
    read = formulas.kv_bytes_read(config, FP16, N_PROMPT)
    return [
        row("KV elements for each token", "elements", 65536, elements, step.kv_bytes_written // 2,
            "exact: written by a step of a run"),
        row("KV bytes for each token", "B", 131072, elements * 2, step.kv_bytes_written),
        row("KV bytes for each token", "KiB", 128, elements * 2 / KIB, step.kv_bytes_written / KIB),
        row(f"KVRead({N_PROMPT})", "MB", 128, N_PROMPT * 128 / 1000, read / 1e6,
            "the text takes 1000 KiB for a MB; 1000 x 131,072 B is 131.07 MB, or 125 MiB"),
        row("KVRead / weight bytes", "", "far below", 128e6 / 14.2e9, read / weights),
        row("context whose KV equals the weights", "tokens", "very long", 14.2e9 / (128 * KIB),
            line.kv_equals_weights_n_context(config, FP16), f"the shape is published for contexts of {config.max_context:,}"),
    ]  # fmt: skip


def tpot_floor(setting):
    chapter = example()
    config, rate = chapter.config, chapter.gpu.memory_bytes_per_s
    int8, mean_context = Precision(weights="int8"), N_PROMPT + N_OUTPUT // 2

    def floor_ms(n_bytes):
        return milliseconds(formulas.tpot_floor_s(n_bytes, rate))

    return [
        row("TPOT_min, fp16 weights", "ms", 14.1, floor_ms(14.2e9), floor_ms(_streamed(chapter)), "without KV"),
        row(f"with the KV of {mean_context:,} tokens", "ms", None, floor_ms(14.2e9 + mean_context * 128 * KIB),
            milliseconds(chapter.floor().tpot_s), "exact: also the embedding row, and the row of KV written"),
        row("TPOT_min, 8-bit weights", "ms", 7.0, floor_ms(7.1e9), floor_ms(formulas.n_streamed_parameters(config)),
            "7.04 of 7.1 GB, 7.05 of 7.111 GB; before scales"),
        row("int8 with its scales", "ms", None, floor_ms(7.1e9),
            floor_ms(formulas.weight_bytes(config, int8, streamed=True)),
                "one fp16 scale for each output channel; gains stay fp16"),
        row(f"int8 with scales and the KV of {mean_context:,}", "ms", None, floor_ms(7.1e9 + mean_context * 128 * KIB),
            milliseconds(chapter.floor(precision=int8).tpot_s)),
    ]  # fmt: skip


def flops(setting):
    config, n_params = setting.config, formulas.n_token_parameters(setting.config)
    a100, peak = gpu("a100-sxm-80gb").matmul_flops_per_s["fp16"], setting.peak
    rows = [
        row("effective rate at eta 0.6", "TFLOP/s", 187.2, formulas.effective_flops_per_s(312e12, 0.6) / 1e12,
            formulas.effective_flops_per_s(a100, 0.6) / 1e12, "312 TFLOP/s is the dense fp16 rate of an A100"),
        row(f"effective rate of the GPU at eta {setting.eta:g}", "TFLOP/s", None,
            None if peak is None else formulas.effective_flops_per_s(peak, setting.eta) / 1e12, over(peak, 1e12),
            f"{setting.gpu.name}; exact: the peak"),
    ]  # fmt: skip
    for n_prompt in LENGTHS:
        rows += _gap_rows(config, n_prompt, n_params, "2*B*L*P")
    if not config.tie_embeddings:
        of_token = " of a token" if config.experts else ""
        rows += _gap_rows(config, LENGTHS[0], formulas.n_active_parameters(config), f"2*B*L*P of all parameters{of_token}")
    if config.experts:
        rows.append(_all_experts(config, LENGTHS[0]))
    rough = formulas.decode_flops_rough(1, N_OUTPUT, n_params)
    exact = run_of(config).total(phase="decode").needed_flops
    rows.append(row(f"2*B*C*P, C = {N_OUTPUT}", "TFLOP", None, rough / 1e12, exact / 1e12,
                    f"{rough / exact - 1:+.2%}: one step more than is taken, and no attention"))  # fmt: skip
    return rows


def _gap_rows(config, n_prompt, n_params, name):
    """Exact prefill FLOPs against the rough ones, and what makes the difference."""
    gap = line.rough_prefill_gap(config, n_prompt, n_params=n_params)
    percent = gap.rough / gap.exact - 1
    rows = [row(f"{name}, L = {n_prompt}", "TFLOP", None, gap.rough / 1e12, gap.exact / 1e12,
                f"formula {percent:+.2%}; the difference below is exact - formula")]  # fmt: skip
    for part, why in (
        ("attention", "left out"),
        ("head", "runs for the last position only"),
        ("embedding", "a look-up, no FLOPs" if gap.embedding else "no part of P"),
        ("vectors", "gains and biases are no matrices"),
    ):
        flops = getattr(gap, part)
        share = flops and over(flops, gap.difference or None)
        rows.append(row(f"share of the difference: {part}", "", None, None, share, f"{flops:+,} FLOPs: {why}"))
    return rows


def _all_experts(config, n_prompt):
    """The rough FLOPs with every expert in P."""
    rough = formulas.prefill_flops_rough(1, n_prompt, formulas.n_streamed_parameters(config))
    exact = sum(line.prefill_flops(config, n_prompt))
    used = f"a token uses {config.experts.n_active} of {config.experts.n_experts} experts"
    return row(f"2*B*L*P of all experts, L = {n_prompt}", "TFLOP", None, rough / 1e12, exact / 1e12,
               f"formula {rough / exact - 1:+.2%}: {used}")  # fmt: skip


def lower_bounds(setting):
    times = setting.predict()
    return [
        row(f"TTFT at eta {setting.eta:g}", "ms", ">= FLOPs / (eta * peak)",
            milliseconds(setting.rough_prefill_s(N_PROMPT, setting.eta)),
            milliseconds(setting.flops_s(times.prefill.needed_flops, setting.eta)), "2*B*L*P against the needed FLOPs"),
        row("TPOT", "ms", ">= bytes / bandwidth", milliseconds(setting.weights_s), milliseconds(times.floor.tpot_s),
            "what else must move: the KV cache"),
    ]  # fmt: skip
