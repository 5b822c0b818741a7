"""tools/trace.py with the models that people run: text, samplers, experts, GGUF files, memory."""

import json
import re
import shutil
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FP32, T1, any_config, precisions, some_tokens
from test_trace import GOLDEN, is_refused, printed, report, run, tool  # noqa: F401 - the fixtures

import costmodel
import npinfer
from costmodel import formulas
from costmodel.memory import PROGRAM_BYTES, numeric_memory_bytes
from costmodel.report import closed_forms
from npinfer import Experts, Latent, Ledger, ModelConfig, Precision, Sampler, Transformer

CASE = GOLDEN / "llama-gqa"
with np.load(CASE / "expected.npz") as expected:
    PROMPT, GREEDY = expected["tokens"][0].tolist(), expected["step_tokens"][0].tolist()


def words(ids):
    return " ".join([f"w{token}" for token in ids])


@pytest.fixture
def folder(tmp_path):
    """A golden checkpoint with a tokenizer whose tokens are the words w0, w1, ..., one for each id."""
    pytest.importorskip("tokenizers", reason='the tokenizers package is not installed: pip install "npinfer[hf]"')
    path = shutil.copytree(CASE, tmp_path / "model")
    vocab = {f"w{token}": token for token in range(101)}
    content = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def with_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


# ---- text


def test_text_is_generated_and_streamed(run, folder):
    """What comes is what an independent implementation chose from the same prompt."""
    result = run("--checkpoint", folder, "--prompt", words(PROMPT), "--output-tokens", 9, "--numeric", "--format", "json")
    printed = json.loads(result.out)
    assert printed["request"] == {
        "batch": 1, "prompt_tokens": len(PROMPT), "output_tokens": 9, "prefix_tokens": 0, "prompt": words(PROMPT)
    }  # fmt: skip
    assert printed["measured"]["tokens"] == GREEDY
    assert printed["measured"]["text"] == words(GREEDY)
    assert printed["closed_form"] == {"agrees": True}
    assert result.err.splitlines()[-1] == words(GREEDY)


def test_text_without_numbers_gives_the_length(report, folder):
    by_text = report("--checkpoint", folder, "--prompt", words(PROMPT))
    by_length = report("--checkpoint", folder, "--prompt-tokens", len(PROMPT))
    assert by_text["request"].pop("prompt") == words(PROMPT)
    assert by_text == by_length


def test_a_batch_has_the_same_text(report, folder):
    arguments = ("--checkpoint", folder, "--output-tokens", 9, "--numeric", "--batch", 2)
    assert report(*arguments, "--prompt", words(PROMPT))["measured"]["tokens"] == GREEDY


def test_stop_ends_at_the_model_s_token(run, report, folder):
    end = GREEDY[4]
    n_output = GREEDY.index(end) + 1
    with_config(folder, eos_token_id=end)
    arguments = ("--checkpoint", folder, "--prompt", words(PROMPT))
    result = run(*arguments, "--numeric", "--stop", "--output-tokens", 9, "--format", "json")
    stopped, shapes = json.loads(result.out), report(*arguments, "--output-tokens", n_output)
    assert stopped["measured"]["tokens"] == GREEDY[:n_output]
    for key in ("request", "memory", "counts", "operations", "closed_form", "predictions"):
        assert stopped[key] == shapes[key]


def test_samplers_draw_what_npinfer_draws(report, folder):
    arguments = ("--checkpoint", folder, "--prompt", words(PROMPT), "--numeric", "--output-tokens", 9)
    drawn = report(*arguments, "--temperature", 2.0, "--top-k", 20, "--top-p", 0.9, "--seed", 5)
    sampler = Sampler(temperature=2.0, top_k=20, top_p=0.9, seed=5)
    expected = npinfer.generate(Transformer.from_checkpoint(folder), PROMPT, 9, sampler=sampler)
    assert drawn["measured"]["tokens"] == expected.tokens[0].tolist() != GREEDY
    assert drawn["request"]["sampler"] == {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 5}
    assert drawn["closed_form"] == {"agrees": True}


# ---- samplers, counted


@pytest.mark.parametrize("flags, flops", [((), 31_999), (("--temperature", 0.5), 4 * 32_000 + 1), (("--top-k", 40), 161)])
def test_a_shape_only_run_counts_the_sampler(report, printed, flags, flops):
    result = report(*flags, "--output-tokens", 3, "--batch", 2)
    sampled = {row["phase"]: row["elementwise_flops"] for row in result["operations"] if row["op"] == "sample"}
    assert sampled == {"prefill": 2 * flops, "decode": 2 * 2 * flops}
    assert result["closed_form"] == {"agrees": True}
    assert ("drawn at temperature" in printed(*flags)) == bool(flags)


def test_sample_counts_by_hand():
    precision = Precision()
    assert formulas.sample_counts(T1, precision, 3) == npinfer.Counts(elementwise_flops=3 * 31, activation_bytes_read=3 * 64)
    for top_k, flops in ((5, 21), (None, 129), (100, 129)):
        counts = formulas.sample_counts(T1, precision, np.array([1, 3]), Sampler(top_k=top_k))
        assert counts.elementwise_flops.tolist() == [flops, 3 * flops]
        assert counts.activation_bytes_read.tolist() == [64, 3 * 64]


@given(
    config=any_config(), precision=precisions(), top_k=st.none() | st.integers(1, 20),
    touched=st.sampled_from(["expected", "all"]), n_output=st.integers(1, 4), batch=st.integers(1, 3),
)  # fmt: skip
def test_ledgers_of_samplers_and_experts_have_a_closed_form(config, precision, top_k, touched, n_output, batch):
    sampler, model = Sampler(top_k=top_k), Transformer.shape_only(config, precision, touched)
    with Ledger() as ledger:
        npinfer.generate(model, some_tokens(config, batch, 5), n_output, sampler=sampler)
    request = {"n_prompt": 5, "n_output": n_output, "batch": batch}
    by_op = {key: counts for key, (_, counts) in ledger.by("phase", "op").items()}
    assert closed_forms(config, precision, **request, touched=touched, sampler=sampler) == by_op
    gpu = costmodel.gpu("h100-sxm")
    from_run = costmodel.predict_from(ledger, gpu, config=config, precision=precision, **request)
    from_forms = costmodel.predict(config, precision, gpu, **request, sampler=sampler, experts_touched=touched)
    assert (from_run.floor, from_run.roofline) == (from_forms.floor, from_forms.roofline)


# ---- experts


def test_which_experts_are_read_is_said(report, printed):
    arguments = ("--config", GOLDEN / "mixtral-moe", "--prompt-tokens", 3, "--output-tokens", 2)
    rules = {rule: report(*arguments, "--experts", rule) for rule in ("expected", "all")}
    assert report(*arguments) == rules["expected"]
    for rule, result in rules.items():
        assert result["experts_touched"] == rule
        assert result["closed_form"] == {"agrees": True}
    less, most = [rules[rule]["counts"]["decode"]["weight_bytes_read"] for rule in ("expected", "all")]
    config = ModelConfig.from_hf(GOLDEN / "mixtral-moe")
    one = 3 * 2 * config.experts.d_ff * config.d_model  # gate, up and down at 16 bits
    idle = config.experts.n_experts - config.experts.n_active
    assert most - less == config.n_layers * idle * one  # one token is expected to touch those it uses
    assert "a forward reads as many as" in printed(*arguments)
    assert "a forward reads all" in printed(*arguments, "--experts", "all")
    assert "choose experts" not in printed("--output-tokens", 2)


def test_a_numeric_run_says_what_it_touched(report):
    arguments = ("--checkpoint", GOLDEN / "mixtral-moe", "--prompt-tokens", 3, "--output-tokens", 4)
    result = report(*arguments, "--numeric")
    experts = ModelConfig.from_hf(GOLDEN / "mixtral-moe").experts
    prefill, *steps = result["experts_touched"]
    assert all(experts.n_active <= n <= min(3 * experts.n_active, experts.n_experts) for n in prefill)
    assert steps == [[experts.n_active] * 2] * 3
    assert result["closed_form"] == {"agrees": True}


@pytest.mark.parametrize("model, line", [
    ("mixtral-8x7b-v0.1", "32 heads, 8 KV heads of 128, 8 experts of 14336, 2 active, vocab 32000"),
    ("deepseek-v3", "128 heads of 192, latent of 512 + 64, 256 experts of 2048, 8 active + 1 shared, 3 layers of d_ff 18432"),
    ("gemma-2-2b", "window 4096 in 13 of 26 layers"),
    ("mistral-7b-v0.1", "d_ff 14336, vocab 32000, window 4096\n"),
])  # fmt: skip
def test_the_first_line_says_what_a_model_is_made_of(printed, model, line):
    assert line in printed("--model", model, "--output-tokens", 2)


def test_parameters_of_a_token(report, printed):
    """Mixtral 8x7B: 46.7 B parameters, of which a token uses 12.9 B; Jiang et al. 2024, arXiv:2401.04088 (47 B and 13 B)."""
    arguments = ("--model", "mixtral-8x7b-v0.1", "--output-tokens", 2)
    model = report(*arguments)["model"]
    assert (model["n_parameters"], model["n_active_parameters"]) == (46_702_792_704, 12_879_925_248)
    assert re.search(r"^parameters +46,702,792,704 +12,879,925,248 used by a token$", printed(*arguments), re.MULTILINE)


# ---- GGUF


@pytest.fixture
def gguf(tmp_path):
    """A small file with matrices in Q8_0, and what writes it."""
    pytest.importorskip("gguf", reason='the gguf package is not installed: pip install "npinfer[gguf]"')
    from test_gguf import write

    return write(tmp_path / "model.gguf", types=lambda name, layer: "F32" if "norm" in name else "Q8_0")


def test_a_gguf_file_counts_the_same_with_and_without_numbers(report, printed, gguf):
    arguments = ("--checkpoint", gguf, "--prompt-tokens", 5, "--output-tokens", 3)
    shapes, numeric = report(*arguments), report(*arguments, "--numeric")
    assert (shapes.pop("mode"), numeric.pop("mode")) == ("shape-only", "numeric")
    assert shapes.pop("measured") is None and numeric.pop("measured")["ttft_s"] > 0
    assert shapes == numeric
    assert shapes["precision"]["weights"] == "q8_0"
    assert "weights q8_0 (some fp32), KV fp32" in printed(*arguments)
    # 8.5 bits of 2 * (256 + 256 + 2 * 128 + 3 * 512) rows of 256 and of embedding and head, 19 rows each; 5 gains at 32 bits.
    assert shapes["memory"]["weight_bytes_resident"] == 256 * (2 * 2304 + 38) * 17 // 16 + 5 * 256 * 4


def test_a_gguf_file_in_another_format(report, gguf):
    for mode in ([], ["--numeric"]):
        result = report("--checkpoint", gguf, "--weights", "int8", "--prompt-tokens", 5, "--output-tokens", 3, *mode)
        assert result["precision"] == {"weights": "int8", "kv": "fp32", "activations": "fp32"}


@pytest.mark.parametrize("n_bytes", [0, 10, 400, 2000, -1])
def test_a_gguf_file_that_is_cut(run, gguf, n_bytes):
    gguf.write_bytes(gguf.read_bytes()[:n_bytes])
    for mode in ([], ["--numeric"]):
        is_refused(run("--checkpoint", gguf, *mode), "model.gguf: ")


# ---- memory


SMALL = dict(n_layers=4, d_model=192, n_heads=6, d_ff=768, vocab_size=6000)
SHAPES = {
    "dense": SMALL | {"n_kv_heads": 2},
    "experts": SMALL | {"experts": Experts(8, 2, 512)},
    "latent": SMALL | {
        "head_dim": 48, "latent": Latent(96, 16, 32, 96),
        "experts": Experts(8, 2, 256, n_shared=1, dense_layers=(0,), gate="sigmoid"),
    },
    "gpt2": SMALL | {
        "learned_positions": True, "norm": "layer", "mlp_act": "gelu", "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        "tie_embeddings": True, "max_context": 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize("weights, pack", [("fp32", False), ("int4", False), ("bf16", True), ("int8", True)])
@pytest.mark.parametrize("n_prompt", [8, 300, 1500])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_memory_of_a_run_is_known_beforehand(shape, n_prompt, weights, pack):
    config, precision = ModelConfig(**SHAPES[shape]), Precision(weights, "fp32", "fp32")
    prompt = some_tokens(config, 1, n_prompt)
    tracemalloc.start()  # NumPy tells it of its arrays
    try:
        npinfer.generate(Transformer.random(config, precision=precision, pack=pack), prompt, 4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = numeric_memory_bytes(config, precision, 1, n_prompt, 4, pack) - PROGRAM_BYTES
    assert expected == pytest.approx(peak, rel=0.15)


def test_weights_stay_in_their_format_where_memory_is_short(tool, monkeypatch, capsys):
    arguments = ["--d-model", "256", "--layers", "20", "--vocab", "2000"]
    arguments += ["--numeric", "--prompt-tokens", "4", "--output-tokens", "2"]
    args = tool.trace.parser().parse_args([*arguments, "--weights", "bf16"])
    config = npinfer.preset("mistral-7b").resized(d_model=256, n_layers=20, vocab_size=2000)
    wide, packed = [numeric_memory_bytes(config, Precision("bf16"), 1, 4, 2, pack) for pack in (False, True)]
    models, said = [], []
    for available in (wide, packed, None):
        monkeypatch.setitem(tool.trace.make_model.__globals__, "available_memory_bytes", lambda available=available: available)
        models.append(tool.trace.make_model(args, 0))
        said.append(capsys.readouterr().err)
    kinds = [{values.dtype for values in model.weights.values() if values.ndim == 2} for model in models]
    assert kinds == [{np.dtype(np.float32)}, {np.dtype(np.uint16)}, {np.dtype(np.float32)}]
    assert re.fullmatch(r"numeric run: needs about \d\.\d\d GB of memory\n", said[0])
    assert re.fullmatch(r"numeric run: needs about .* GB of memory, weights kept in bf16 and slower for it: .*\n", said[1])
    logits = [model.prefill([1, 2, 3], model.new_cache()) for model in models[:2]]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)

    monkeypatch.setitem(tool.trace.make_model.__globals__, "available_memory_bytes", lambda: packed - 1)
    with pytest.raises(npinfer.InputError, match="GB is available; leave out --numeric"):
        tool.trace.make_model(args, 0)
    args.weights = "fp32"
    monkeypatch.setitem(tool.trace.make_model.__globals__, "available_memory_bytes", lambda: packed)
    with pytest.raises(npinfer.InputError, match="GB is available; leave out --numeric"):
        tool.trace.make_model(args, 0)


def test_progress_counts_every_tensor(tool):
    """As many as the source is asked for, those of each expert by itself."""
    for case in ("llama-gqa", "mixtral-moe", "deepseek-v3", "gpt2", "gpt-oss"):
        config, asked = ModelConfig.from_hf(GOLDEN / case), []
        Transformer(config, FP32, lambda *tensor: asked.append(tensor) or np.zeros(tensor[2], np.float32))
        assert len(asked) == costmodel.report.n_tensors(config)


# ---- learned positions, case 3


def test_learned_positions_go_on_where_the_cache_ends():
    """5 tokens whole, and as 3, 1 and 1: the position of a token does not depend on the call it came in."""
    config = replace(T1, learned_positions=True, max_context=8, norm="layer", mlp_act="gelu", n_kv_heads=4)
    model, prompt = Transformer.random(config, precision=FP32), some_tokens(config, 1, 5)
    table = model.weights.positions.data
    table[:] = np.arange(8, dtype=np.float32)[:, None] * np.where(np.arange(16) % 3, 1, -2).astype(np.float32)
    whole = model.prefill(prompt, model.new_cache(), all_logits=True)[0]
    cache = model.new_cache()
    model.prefill(prompt[:, :3], cache)
    parts = [model.decode(prompt[:, 3], cache)[0], model.prefill(prompt[:, 4:], cache)[0]]
    np.testing.assert_allclose(parts, whole[3:], rtol=0, atol=1e-5)
    slipped = model.prefill(prompt[:, 3:4], model.new_cache())[0]  # what position 0 would have given
    assert np.abs(slipped - whole[3]).max() > 0.01


# ---- bad input


BAD = [
    ("--prompt hello", "--prompt needs a tokenizer, which a --checkpoint comes with"),
    ("--config CASE --prompt hello", "--prompt needs a tokenizer"),
    ("--checkpoint CASE --prompt=", "--prompt is empty, expected some text"),
    ("--checkpoint CASE --prompt hello --prompt-tokens 5", "argument --prompt-tokens: not allowed with argument --prompt"),
    ("--temperature 0", "temperature is 0.0, expected a positive number"),
    ("--temperature -1", "temperature is -1.0"),
    ("--temperature nan", "temperature is nan"),
    ("--temperature hot", "argument --temperature: invalid float value: 'hot'"),
    ("--top-p 0", "top_p is 0.0"),
    ("--top-p 2", "top_p is 2.0, expected a probability above 0 and at most 1"),
    ("--top-k 0", "top_k is 0, expected from 1"),
    ("--top-k 2.5", "argument --top-k: invalid int value: '2.5'"),
    ("--stop", "--stop waits for a token, which only a numeric run has; add --numeric"),
    ("--stop --numeric", "and mistral-7b says none"),
    ("--experts all --numeric", "a numeric one reads those that its tokens choose"),
    ("--experts all", "--experts is for models that have some, and mistral-7b has none; leave it out"),
    ("--experts most", "invalid choice: 'most'"),
    ("--model gpt-2", "gpt-2 has learned 1024 positions and 1099 are asked for; use fewer --prompt-tokens or --output-tokens"),
    ("--checkpoint GOLDEN/gpt2 --numeric", "gpt2 has learned 128 positions and 1099 are asked for"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_one_line_and_status_2(run, arguments, message):
    arguments = arguments.replace("CASE", str(CASE)).replace("GOLDEN", str(GOLDEN))
    is_refused(run(*arguments.split(" ")), message)


def test_text_that_has_no_tokenizer_or_no_tokens(run, folder):
    is_refused(run("--checkpoint", folder, "--prompt", " "), "--prompt is ' ', which has no tokens; expected some text")
    (folder / "tokenizer.json").unlink()
    is_refused(run("--checkpoint", folder, "--prompt", "w1"), "tokenizer.json: cannot be read (No such file or directory)")


def test_a_missing_extra_is_named(run, monkeypatch, tmp_path):
    for package in ("tokenizers", "gguf"):
        monkeypatch.setitem(sys.modules, package, None)  # which makes an import of it fail
    is_refused(run("--checkpoint", CASE, "--prompt", "w1"), 'pip install "npinfer[hf]"')
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    is_refused(run("--checkpoint", tmp_path / "model.gguf"), 'pip install "npinfer[gguf]"')


def test_a_gguf_path_that_is_no_file(run, tmp_path):
    is_refused(run("--checkpoint", tmp_path / "missing.gguf"), "missing.gguf: cannot be read")
    (tmp_path / "folder.gguf").mkdir()
    is_refused(run("--checkpoint", tmp_path / "folder.gguf"), "folder.gguf: ")


@pytest.mark.parametrize("keys, message", [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    ({"model_type": "rwkv"}, "model_type is 'rwkv', which is not supported; supported: llama"),
    ({"vision_config": {"hidden_size": 8}}, "vision_config"),
])  # fmt: skip
def test_configs_that_are_not_run(run, tmp_path, keys, message):
    folder = with_config(shutil.copytree(CASE, tmp_path / "model"), **keys)
    for flag in ("--config", "--checkpoint"):
        is_refused(run(flag, folder), message)


def test_a_folder_without_a_config(run, tmp_path):
    is_refused(run("--checkpoint", tmp_path), "config.json: cannot be read")
