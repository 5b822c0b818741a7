"""What --explain prints: evaluated again as text, and held to the ledger, the closed forms and the prediction."""

import ast
import math
import re
from dataclasses import fields, replace
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import costmodel
import npinfer
from costmodel import GPU, formulas, gpu, predict
from costmodel.arguments import least, most
from costmodel.explain import explain
from costmodel.traced import NAMES, VALUES, Traced, digits
from npinfer import InputError, Ledger, Precision, Transformer, preset
from npinfer.generate import no_tokens
from strategies import T1, any_config, batches, configs, exceptions, precisions

MISTRAL = preset("mistral-7b")
PHASE_FIELDS = ("matmul_flops", "masked_flops", "needed_flops", "weight_bytes_read", "kv_bytes_read", "kv_bytes_written")
devices = st.builds(
    GPU,
    name=st.just("any"),
    memory_bytes=st.just(10**6),
    memory_bytes_per_s=st.floats(1e6, 1e15),
    matmul_flops_per_s=st.fixed_dictionaries({}, optional={
        name: st.floats(1e6, 1e18) for name in ("fp32", "fp16", "bf16", "fp8")
    }),
)


class Rounding(ast.NodeTransformer):
    """Works out what is rounded as Python does, in floats: the documented way to the number of experts touched."""

    def __init__(self, names):
        self.known = {name: int(value) for name, value in names.items() if value == int(value)}

    def visit_Call(self, node):
        if node.func.id != "round":
            return self.generic_visit(node)
        whole = ast.parse(re.sub(r"Fraction\('(\d+)'\)", r"\1", ast.unparse(node)), mode="eval")
        return ast.copy_location(ast.Constant(eval(compile(whole, "text", "eval"), self.known)), node)


def evaluate(text, names=None):
    """What a person gets who works the text out, exactly but for what is rounded."""
    text = re.sub(r"(\d) B\b", r"\1", text).replace(" x ", " * ")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)  # thousands
    text = re.sub(r"(?<![\w.])\d[\d.]*(e-?\d+)?", lambda number: f"Fraction('{number[0]}')", text)
    known = {"Fraction": Fraction, "ceil": math.ceil, "floor": math.floor, "min": min, "max": max, "__builtins__": {}}
    tree = ast.fix_missing_locations(Rounding(names or {}).visit(ast.parse(text, mode="eval")))
    return eval(compile(tree, "text", "eval"), known, names or {})


def names_of(config, precision, request, device, compute):
    """Values of the names that have no line of their own."""
    sizes = {field.name: getattr(config, field.name) for field in fields(config)}
    sizes |= vars(config.latent) if config.latent else {}
    sizes |= vars(config.experts) | {"expert_d_ff": config.experts.d_ff, "d_ff": config.d_ff} if config.experts else {}
    names = {name: Fraction(value) for name, value in (sizes | request).items() if type(value) is int}
    kinds = [(precision.exceptions_of(layer), *kind) for layer, kind in enumerate(config.kinds)]
    some = list(dict.fromkeys([formats for formats, *_ in kinds]))
    words = [
        ("full" if window is None else "windowed", "sparse" if sparse else "dense", f"formats_{some.index(formats) + 1}")
        for formats, window, sparse in kinds
    ]
    for n_words in (1, 2, 3):
        for columns in combinations(range(3), n_words):
            for layer in words:
                suffix = [layer[column] for column in columns]
                names["_".join(["n_layers", *suffix])] = Fraction(sum([[w[c] for c in columns] == suffix for w in words]))
    rates = {"memory_bytes_per_s": device.memory_bytes_per_s, "eta": 0.6}
    if compute in device.matmul_flops_per_s:
        rates["matmul_flops_per_s"] = device.matmul_flops_per_s[compute]
    return names | {name: Fraction(rate) for name, rate in rates.items()}


def check(lines, names):
    """Both texts of every line give its value; it is a name in the lines behind it."""
    for line in lines:
        by_name, filled_in, value = evaluate(line["expression"], names), evaluate(line["values"]), line["value"]
        if isinstance(value, int):
            assert by_name == filled_in == value, line
        else:
            assert float(by_name) == pytest.approx(value, rel=1e-12), line
            # Up to three numbers of six digits, each off by half a unit of the last.
            assert float(filled_in) == pytest.approx(value, rel=1.6e-5), line
        assert not re.search(r"[a-wyz_]{2}", re.sub(r"min|max|floor|ceil|round", "", line["values"])), line
        names[line["name"]] = Fraction(value)


@settings(max_examples=30)
@given(
    config=configs() | any_config(), precision=precisions(), batch=batches,
    n_prompt=st.integers(1, 9), n_output=st.integers(1, 6), device=devices,
)  # fmt: skip
@example(T1, Precision("int4", "int8"), 2, 3, 4, gpu("rtx-4090"))
@example(replace(T1, sliding_window=1), Precision(), 1, 1, 1, gpu("rtx-4090"))
@example(replace(T1, sliding_window=4), Precision(bits_per_weight=2.3), 3, 2, 5, gpu("rtx-4090"))
def test_the_text_gives_the_numbers_of_the_ledger_and_the_prediction(config, precision, batch, n_prompt, n_output, device):
    request = {"batch": batch, "n_prompt": n_prompt, "n_output": n_output}
    lines = explain(config, precision, [device], **request)
    check(lines, names_of(config, precision, request, device, precision.activations))
    value = {line["name"]: line["value"] for line in lines}
    model = Transformer.shape_only(config, precision)
    with Ledger() as ledger:
        npinfer.generate(model, no_tokens((batch, n_prompt)), n_output)
    assert value["n_parameters"] == formulas.n_parameters(config)
    assert value["n_streamed_parameters"] == formulas.n_streamed_parameters(config)
    assert value["weight_bytes_resident"] == formulas.weight_bytes(config, precision)
    assert value["weight_bytes_streamed"] == formulas.weight_bytes(config, precision, streamed=True)
    assert value["kv_bytes_per_token"] == model.kv_bytes_per_token
    assert value["kv_bytes"] == formulas.kv_bytes_held(config, precision, n_prompt + n_output - 1, batch)
    prediction = predict(config, precision, device, **request)
    for phase in ("prefill", "decode")[: 1 + (n_output > 1)]:
        counts = ledger.total(phase=phase)
        for field in PHASE_FIELDS:
            if phase == "prefill" or field not in ("masked_flops", "needed_flops"):  # a decode step masks nothing
                assert value[f"{phase}_{field}"] == getattr(counts, field)
        assert value[f"{phase}_streamed_bytes"] == counts.weight_bytes_read + counts.kv_bytes
        assert value[f"{phase}_flops_per_byte"] == getattr(prediction, phase).intensity
    floor, rough = prediction.floor, prediction.rough
    for name, expected in {
        "ttft_floor_s": floor.ttft_s, "tpot_floor_s": floor.tpot_s, "latency_floor_s": floor.latency_s,
        "latency_exact_floor_s": floor.latency_exact_s if n_output > 1 else None, "tokens_per_s_floor": floor.tokens_per_s,
        "ttft_rough_s": rough.ttft_s, "tpot_rough_s": rough.tpot_s, "tpot_compute_rough_s": rough.tpot_compute_s,
        "tpot_bandwidth_rough_s": rough.tpot_bandwidth_s, "ridge_flops_per_byte": prediction.ridge,
    }.items():  # fmt: skip
        assert value.get(name) == (expected if expected is None else pytest.approx(expected, rel=1e-12)), name


@settings(max_examples=12)
@given(
    config=any_config(), batch=batches, n_prompt=st.integers(1, 9), n_output=st.integers(2, 6),
    some=exceptions("embed", "q_proj", "gate_proj", "down_proj", "down_proj.bias", "attn_norm", "kv_expand", "lm_head"),
)  # fmt: skip
def test_layers_of_several_formats_have_lines_of_their_own(config, batch, n_prompt, n_output, some):
    precision, request = Precision(exceptions=some), {"batch": batch, "n_prompt": n_prompt, "n_output": n_output}
    lines = explain(config, precision, [], **request)
    check(lines, names_of(config, precision, request, gpu("rtx-4090"), "fp16"))
    value = {line["name"]: line["value"] for line in lines}
    assert value["weight_bytes_resident"] == formulas.weight_bytes(config, precision)
    for phase, counts in (
        ("prefill", formulas.forward_counts(config, precision, batch, 0, n_prompt)),
        ("decode", formulas.decode_counts_total(config, precision, **request)),
    ):
        assert value[f"{phase}_matmul_flops"] == counts.matmul_flops
        assert value[f"{phase}_weight_bytes_read"] == counts.weight_bytes_read
        assert value[f"{phase}_kv_bytes_read"] == counts.kv_bytes_read


def test_the_textbook_s_line():
    (line,) = [line for line in explain(MISTRAL, Precision(), [], 1000, 100) if line["name"] == "kv_bytes_per_token"]
    assert line == {
        "name": "kv_bytes_per_token", "gpu": None, "expression": "2 x n_layers x n_kv_heads x head_dim x 2 B",
        "values": "2 x 32 x 8 x 128 x 2", "value": 131072, "unit": "B", "section": "4.2",
    }  # fmt: skip


def test_lines_of_experts_and_latents():
    lines = {line["name"]: line for line in explain(preset("deepseek-v3"), Precision(), [gpu("h100-sxm")], 1000, 100)}
    assert lines["kv_bytes_per_token"]["expression"] == "n_layers x (kv_rank + rope_dim) x 2 B"
    assert lines["kv_bytes_per_token"]["value"] == 61 * (512 + 64) * 2
    read = lines["prefill_expert_bytes_read"]
    assert read["expression"] == (
        "3 x round(n_experts x expert_matrix_bytes x (1 - (1 - n_active / n_experts) ** prefill_tokens))"
    )
    assert read["values"] == "3 x round(256 x 29,360,128 x (1 - (1 - 8 / 256) ** 1,000))"
    # 7168 x 2048 in each of three matrices; 31/32 to the 1000th is 1.6e-14: all 256 are touched, to 1.2e-4 of a byte a matrix
    assert read["value"] == 3 * 256 * 7168 * 2048 * 2
    assert lines["decode_expert_share"]["value"] == 8 / 256
    assert lines["decode_surplus_bytes"]["value"] == 0  # one token touches its own


def test_each_gpu_has_its_lines_and_a_missing_rate_none():
    without = GPU("without", memory_bytes=10**9, memory_bytes_per_s=1e9)
    lines = explain(MISTRAL, Precision(), [gpu("rtx-4090"), without], 1000, 100, compute="int8")
    named = {device: [line["name"] for line in lines if line["gpu"] == device] for device in ("rtx-4090", "without")}
    assert named["without"] == ["tpot_floor_s", "tpot_bandwidth_rough_s", "tpot_rough_s"]
    assert {"ttft_floor_s", "latency_exact_floor_s", "tokens_per_s_floor", "ttft_rough_s"} < set(named["rtx-4090"])
    (line,) = [line for line in lines if line["name"] == "ridge_flops_per_byte"]
    assert line["values"] == f"{digits(gpu('rtx-4090').matmul_flops_per_s['int8'])} / 1.008e12"


@pytest.mark.parametrize("name", npinfer.presets())
@pytest.mark.parametrize("precision", [
    Precision(), Precision("int8", "int8"), Precision("int4"), Precision(bits_per_weight=4.83),
])  # fmt: skip
def test_lines_stay_readable(name, precision):
    lines = explain(preset(name), precision, [gpu("rtx-4090")], 1000, 100)
    lengths = {line["name"]: len(line["expression"]) for line in lines}
    if preset(name).sliding_window:  # a window that fills during the decode has two parts
        several = len(set(preset(name).windows)) > 1
        assert lengths.pop("decode_keys_windowed" if several else "decode_keys") < 260
    if preset(name).latent:  # five matrices, each with scales
        assert lengths.pop("layer_attention_matrix_bytes") < 330
    assert max(lengths.values()) < 230


# ---- traced numbers


@given(a=st.integers(1, 9), b=st.integers(1, 9), c=st.integers(1, 300))
def test_traced_numbers_compute_and_print(a, b, c):
    x, y = Traced.named("x_", a), Traced.named("y_", b)
    for number, plain in (
        ((x + 1) * (y - x) * 3, (a + 1) * (b - a) * 3),
        (-(-x * c // 8), -(-a * c // 8)),
        ((x * x + y) // 2, (a * a + b) // 2),
        (-(x + y) // 3, -(a + b) // 3),
        (2 - x - x, 2 - 2 * a),
        (x - x, 0),
        (least(x - 3, y) + most(c, x), min(a - 3, b) + max(c, a)),
        ((x + y) / (x * y) / (y / 2) * c, Fraction(a + b, a * b) / Fraction(b, 2) * c),
        (c / (x / y), c / Fraction(a, b)),
    ):
        assert number.value == (plain if isinstance(plain, int) else pytest.approx(float(plain)))
        assert evaluate(number.text(VALUES)) == evaluate(number.text(NAMES), {"x_": Fraction(a), "y_": Fraction(b)}) == plain


def test_text_merges_like_terms_and_pulls_out_what_they_share():
    a, b, c = [Traced.named(name, value) for name, value in (("a", 2), ("b", 3), ("c", 5))]
    assert (b * a * 2 + a * c + a * b).text() == "a x (3 x b + c)"
    assert (a * b - b * a + c).text() == "c"
    assert (2 * a * b + 2 * a * c + 4 * c).text() == "2 x (a x (b + c) + 2 x c)"
    assert (-a - b).text() == "-a - b"
    assert (c * 16 // 8).text() == "c x 2 B"
    assert (c * a * 4 // 8).text() == "a x c x 0.5 B"
    assert (-(-c * 4 // 8)).text() == "ceil(c / 2)"
    assert (a / (b * c)).text(VALUES) == "2 / (3 x 5)"


@pytest.mark.parametrize("value, text", [
    (131072, "131,072"), (165.2e12, "165.2e12"), (0.0860854237, "0.0860854"), (0.6, "0.6"), (1.5e-9, "1.5e-9"),
])  # fmt: skip
def test_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize("request_", [
    {"n_prompt": 0, "n_output": 1}, {"n_prompt": 1, "n_output": 0}, {"n_prompt": 1, "n_output": 1, "batch": 0},
])  # fmt: skip
def test_requests_that_are_none_are_refused(request_):
    with pytest.raises(InputError, match="expected at least 1"):
        explain(T1, Precision(), [], **request_)
    with pytest.raises(InputError):
        explain(T1, Precision(), [costmodel.gpu("rtx-4090")], 1, 1, compute="fp7")
