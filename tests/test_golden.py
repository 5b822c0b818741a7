"""Six small checkpoints with the outputs of an independent implementation: logits, greedy tokens, FLOPs, parameters.

expected.npz of a case, B sequences of L tokens, 9 decode steps:

    tokens, logits                 (B, L), (B, L, vocab): the prompt and one whole forward over it
    step_tokens, step_logits       (B, 9), (B, 9, vocab): each token fed after it, greedily, and what it gives
    matmul_flops_all_logits, _prefill, _decode    of that forward, of one with the last logits only, of the first step
    n_parameters                   tied weights once
"""

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import npinfer
from costmodel import formulas
from costmodel.experts import observed
from npinfer import Ledger, Precision, Transformer
from strategies import run

GOLDEN = Path(__file__).parent / "golden"
CASES = (
    "llama-gqa", "llama-mha-tied", "llama-mqa-bias", "llama3-scaled-rope", "llama-bf16-sharded", "mistral-window",
    "mixtral-moe", "qwen2-bias", "qwen3-qknorm", "qwen3-moe", "gemma2", "gemma3", "phi3-fused", "gpt2", "olmo2",
    "deepseek-v3", "gpt-oss",
)  # fmt: skip
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Folder, model and expected arrays of one case, and whether it was all there."""
    folder = GOLDEN / request.param
    with np.load(folder / "expected.npz") as expected:
        return SimpleNamespace(folder=folder, model=Transformer.from_checkpoint(folder), **expected)


def close(actual, expected):
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def prefilled(case, **options):
    """A cache that holds the prompt, the logits and the ledger of the forward that filled it."""
    ledger, cache, (logits,) = run(case.model, case.tokens, [case.tokens.shape[1]], **options)
    return cache, logits, ledger


def test_every_folder_is_a_case():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(CASES)


# ---- what it computes


def test_logits_of_every_position(case):
    cache, logits, _ = prefilled(case, all_logits=True)
    close(logits, case.logits)
    assert cache.length == case.tokens.shape[1]


def test_logits_of_the_last_position(case):
    close(prefilled(case)[1], case.logits[:, -1])


def test_every_decode_step(case):
    cache, *_ = prefilled(case)
    for step in range(9):
        close(case.model.decode(case.step_tokens[:, step], cache), case.step_logits[:, step])


def test_greedy_tokens(case):
    generated = npinfer.generate(case.model, case.tokens, 10)
    after_last = case.step_logits[:, -1].argmax(axis=1)
    assert generated.tokens.tolist() == np.column_stack([case.step_tokens, after_last]).tolist()


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9])
def test_a_prompt_in_chunks_of_one_size(case, size):
    n_tokens = case.tokens.shape[1]
    chunks = [min(size, n_tokens - start) for start in range(0, n_tokens, size)]
    _, cache, logits = run(case.model, case.tokens, chunks, all_logits=True)
    close(np.concatenate(logits, axis=1), case.logits)
    close(case.model.decode(case.step_tokens[:, 0], cache), case.step_logits[:, 0])


def test_a_prompt_cut_in_two_anywhere(case):
    n_tokens = case.tokens.shape[1]
    for cut in range(1, n_tokens):
        _, _, logits = run(case.model, case.tokens, [cut, n_tokens - cut], all_logits=True)
        close(np.concatenate(logits, axis=1), case.logits)


def test_a_batch_in_rows_of_its_own(case):
    for row, tokens in enumerate(case.tokens):
        close(case.model.prefill(tokens, case.model.new_cache(), all_logits=True)[0], case.logits[row])


# ---- what it counts


def test_matmul_flops_of_a_run(case):
    cache, _, ledger = prefilled(case)
    assert ledger.total().matmul_flops == case.matmul_flops_prefill
    with Ledger() as ledger:
        case.model.decode(case.step_tokens[:, 0], cache)
    assert ledger.total().matmul_flops == case.matmul_flops_decode
    assert prefilled(case, all_logits=True)[2].total().matmul_flops == case.matmul_flops_all_logits


def test_matmul_flops_of_the_closed_form(case):
    (batch, n_prompt), config, precision = case.tokens.shape, case.model.config, case.model.precision

    def matmul_flops(*sizes, **options):
        return formulas.forward_counts(config, precision, batch, *sizes, **options).matmul_flops

    assert matmul_flops(0, n_prompt, all_logits=True) == case.matmul_flops_all_logits
    assert matmul_flops(0, n_prompt) == case.matmul_flops_prefill
    assert matmul_flops(n_prompt, 1) == case.matmul_flops_decode
    # Two output tokens are the prefill's and one step's.
    assert formulas.decode_counts_total(config, precision, batch, n_prompt, 2).matmul_flops == case.matmul_flops_decode


def test_all_ten_counts_equal_the_closed_form(case):
    batch, n_prompt = case.tokens.shape
    chunks = [5, n_prompt - 5]
    ledger, *_ = run(case.model, np.hstack([case.tokens, case.step_tokens]), chunks, 9)
    starts = accumulate([*chunks, *[1] * 8], initial=0)
    config, precision = case.model.config, case.model.precision
    expected = [
        formulas.forward_counts(config, precision, batch, start, n_new, experts_touched=observed(ledger, config, precision, forward))
        for forward, (start, n_new) in enumerate(zip(starts, [*chunks, *[1] * 9]))
    ]
    assert [counts for _, counts in ledger.by("forward").values()] == expected


def test_n_parameters(case):
    assert formulas.n_parameters(case.model.config) == case.n_parameters


# ---- formats


def test_a_checkpoint_keeps_the_format_it_is_stored_in(case):
    stored = "bf16" if case.folder.name == "llama-bf16-sharded" else "fp32"
    assert case.model.precision == Precision(weights=stored, kv="fp32", activations="fp32")


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weights", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_a_precision_that_is_given_takes_the_place_of_the_stored_one(case, weights, kv):
    """Counted in the format that was asked for; computed as near to the exact logits as it allows."""
    precision = Precision(weights=weights, kv=kv, activations="fp16")
    model = Transformer.from_checkpoint(case.folder, precision=precision)
    assert model.precision == precision
    n_tokens = case.tokens.shape[1]
    ledger, _, (logits,) = run(model, case.tokens, [n_tokens], all_logits=True)
    touched = observed(ledger, model.config, precision, 0)
    assert ledger.total() == formulas.forward_counts(
        model.config, precision, len(case.tokens), 0, n_tokens, all_logits=True, experts_touched=touched
    )
    error = np.abs(logits - case.logits).max()
    if kv == "fp32" and weights in ("fp32", str(case.model.precision.weights)):
        assert error <= TOLERANCE
    elif model.config.experts:  # a token that is near two experts may go to the other
        assert TOLERANCE < error <= 5.0
    elif kv == "fp32" and weights == "fp16":  # holds almost all of bf16's values, and 11 bits of fp32's
        assert error <= 0.01
    else:
        assert TOLERANCE < error <= (3.0 if weights == "int4" else 0.3)  # steps of a seventh of the largest weight
