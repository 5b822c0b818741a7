"""Samplers against the softmax they draw from, and their counts against an oracle that watches them execute."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tally import Tally

import npinfer
from npinfer import InputError, Ledger, Transformer
from npinfer.formats import ALLOWED, FORMATS
from npinfer.ledger import Counts
from npinfer.sampling import Sampler, draw
from npinfer.specs import spec
from strategies import FP32, T1, some_tokens

PROMPT = some_tokens(T1, 2, 5)
settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0]),
        "top_k": st.none() | st.integers(1, 12),
        "top_p": st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    }
)
matrices = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**16))


def logits_of(batch, vocab_size, seed):
    """Normally distributed, every other seed with equal ones among them."""
    logits = 2 * np.random.default_rng(seed).standard_normal((batch, vocab_size), dtype=np.float32)
    return logits if seed % 2 else logits.round()


def kept_by_definition(row, temperature, top_k, top_p):
    """Probabilities {id: p} of what may be drawn from one row, float64, one token at a time."""
    largest = max(row)
    weights = [float(np.exp((x - largest) / temperature)) for x in row.astype(np.float64).tolist()]
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[:top_k]
    kept, total = {}, sum(weights[token] for token in ranked)
    for token in ranked:
        if sum(kept.values()) >= top_p * total * (1 - 1e-6):
            break
        kept[token] = weights[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def drawn(logits, uniform, **setting):
    return draw.__wrapped__(logits, np.full(len(logits), uniform, np.float32), **setting)


# ---- what is drawn


@given(size=matrices, setting=settings)
@example(size=(1, 3, 0), setting={"temperature": 1.0, "top_k": 1, "top_p": 1.0})
def test_each_token_is_drawn_as_often_as_it_is_likely(size, setting):
    """Uniform numbers on a grid: each token gets its share of them, to a point of the grid at either end."""
    logits, n_points = logits_of(*size), 512
    grid = (np.arange(n_points, dtype=np.float32) + np.float32(0.5)) / np.float32(n_points)
    for row in logits:
        tokens = draw.__wrapped__(np.tile(row, (n_points, 1)), grid, **setting)
        shares = np.bincount(tokens, minlength=len(row)) / n_points
        expected = kept_by_definition(row, **setting)
        for token in range(len(row)):
            assert abs(shares[token] - expected.get(token, 0)) <= 2 / n_points


@given(size=matrices, uniform=st.floats(0, 1, exclude_max=True, width=32))
def test_one_candidate_is_the_greedy_choice(size, uniform):
    logits = logits_of(*size)
    for setting in ({"top_k": 1, "top_p": 1.0}, {"top_k": None, "top_p": 1e-6}):
        assert drawn(logits, uniform, temperature=1.0, **setting).tolist() == logits.argmax(axis=1).tolist()


def test_the_cut_by_hand():
    # Probabilities 0.5, 0.25, 0.125, 0.125 of tokens 2, 0, 1, 3.
    logits = np.log(np.array([[0.25, 0.125, 0.5, 0.125]], np.float32))
    plain = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
    assert [int(drawn(logits, u, **plain)[0]) for u in (0.0, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88)] == [2, 2, 0, 0, 1, 1, 3]
    assert [int(drawn(logits, u, **plain | {"top_k": 2})[0]) for u in (0.66, 0.67, 0.99)] == [2, 0, 0]  # 2/3 and 1/3
    assert [int(drawn(logits, u, **plain | {"top_p": 0.6})[0]) for u in (0.66, 0.67, 0.99)] == [2, 0, 0]  # 0.75 reach 0.6
    # Squared by temperature 1/2: 16, 4, 1, 1 of 22.
    assert [int(drawn(logits, u, **plain | {"temperature": 0.5})[0]) for u in (0.72, 0.73, 0.90, 0.91)] == [2, 0, 0, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_and_logits_neither_warn_nor_leave_the_vocabulary(temperature):
    logits = np.array([[3e38, -3e38, 0.0, -np.inf], [1.0, 1.0, 0.5, -np.inf]], np.float32)
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = drawn(logits, almost_one, temperature=temperature, top_k=None, top_p=1.0)
    # 3e38 is far from 0 at either. Cold: the second of two equal ones. Hot: the last that is possible at all.
    assert tokens.tolist() == ([0, 1] if temperature < 1 else [0, 2])


@given(size=matrices, setting=settings)
def test_no_number_is_widened(size, setting):
    logits = logits_of(*size)
    seen = []

    class Seen(np.ndarray):
        """Notes the type of whatever arithmetic gives."""

        def __array_ufunc__(self, ufunc, method, *operands, **options):
            plain = [np.asarray(x) if isinstance(x, Seen) else x for x in operands]
            result = getattr(ufunc, method)(*plain, **options)
            seen.append(result.dtype)
            return result.view(Seen)

    draw.__wrapped__(logits.view(Seen), np.full(len(logits), 0.5, np.float32), **setting)
    assert np.float32 in seen
    assert np.float64 not in seen


# ---- what it costs


@given(size=matrices, setting=settings)
def test_the_rule_counts_what_is_executed(size, setting):
    logits, tally = logits_of(*size), Tally()
    uniform = np.full(len(logits), 0.5, np.float32)
    watched = draw.__wrapped__(tally.watch(logits), uniform, **setting)
    _, ((op, counts),) = draw.rule(spec(logits.shape, FORMATS["fp32"]), spec(uniform.shape, None, "constant"), **setting)
    assert op == "sample"
    assert (counts.matmul_flops, counts.elementwise_flops) == tally.flops
    assert watched.shape == (len(logits),)


@pytest.mark.parametrize("name", ALLOWED["activations"])
def test_the_rule_by_hand(name):
    x = spec((3, 100), FORMATS[name]), spec((3,), None, "constant")
    moved = 300 * FORMATS[name].bits // 8
    # Of each row, k candidates: k subtractions, k divisions, k exponentials, k - 1 additions, 2 multiplications.
    for top_k, flops in ((7, 3 * 29), (None, 3 * 401), (1000, 3 * 401)):
        _, ((_, counts),) = draw.rule(*x, temperature=0.7, top_k=top_k, top_p=0.9)
        assert counts == Counts(elementwise_flops=flops, activation_bytes_read=moved)


@given(setting=settings, n_output=st.integers(1, 4))
def test_numeric_and_shape_only_runs_count_the_same(setting, n_output):
    ledgers = []
    for model in (Transformer.random(T1, precision=FP32), Transformer.shape_only(T1, FP32)):
        with Ledger() as ledger:
            npinfer.generate(model, PROMPT, n_output, sampler=Sampler(**setting))
        ledgers.append(ledger.by("forward", "phase", "op"))
    assert ledgers[0] == ledgers[1]
    sampled = [(forward, phase) for forward, phase, op in ledgers[0] if op == "sample"]
    assert sampled == [(0, "prefill"), *[(step, "decode") for step in range(1, n_output)]]


# ---- generate


@pytest.fixture(scope="module")
def model():
    return Transformer.random(T1, seed=3, precision=FP32)


def generated(model, n_output=8, **options):
    return npinfer.generate(model, PROMPT, n_output, **options).tokens.tolist()


def test_the_same_seed_gives_the_same_tokens(model):
    sampler = Sampler(temperature=2.0, seed=5)
    assert generated(model, sampler=sampler) == generated(model, sampler=sampler)
    assert generated(model, sampler=sampler) != generated(model, sampler=Sampler(temperature=2.0, seed=6))


def test_one_candidate_generates_as_greedy_does(model):
    assert generated(model, sampler=Sampler(top_k=1)) == generated(model)


def test_sequences_of_a_batch_draw_by_themselves(model):
    """Two equal prompts get numbers of their own."""
    tokens = npinfer.generate(model, PROMPT[[0, 0]], 12, sampler=Sampler(temperature=3.0)).tokens
    assert tokens[0].tolist() != tokens[1].tolist()


@pytest.mark.parametrize(
    "setting, match",
    [
        ({"temperature": 0}, "temperature is 0, expected a positive number; for the likeliest token give no sampler"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-60}, "temperature is 0.0"),  # as float32
        ({"temperature": 1e60}, "temperature is inf"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"top_p": 1.5}, "top_p is 1.5, expected a probability above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": 0}, "top_k is 0, expected from 1"),
        ({"top_k": 2.5}, "top_k is 2.5, expected a whole number"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_are_none(setting, match):
    with pytest.raises(InputError, match=match):
        Sampler(**setting)


@pytest.mark.parametrize("sampler", [None, Sampler()])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers(wrong, sampler):
    model = Transformer.random(T1, precision=FP32)
    model.weights.final_norm.args[0].data[3] = wrong
    with pytest.raises(InputError, match=r"logits are infinite or not numbers \(NaN\)"):
        npinfer.generate(model, PROMPT, 2, sampler=sampler)


# ---- stop tokens


def cut(row, stop):
    """The tokens of one sequence up to its first stop token, which is repeated to the end."""
    ends = [at for at, token in enumerate(row) if token in stop]
    return row[: ends[0]] + [row[ends[0]]] * (len(row) - ends[0]) if ends else row


@given(stop=st.lists(st.integers(0, T1.vocab_size - 1), max_size=6), sampler=st.none() | st.just(Sampler(2.0)))
def test_a_sequence_repeats_its_stop_token_and_the_batch_ends_with_the_last(stop, sampler):
    model = Transformer.random(T1, seed=3, precision=FP32)
    whole = [npinfer.generate(model, PROMPT, 8, sampler=sampler).tokens[row].tolist() for row in (0, 1)]
    expected = [cut(row, stop) for row in whole]
    firsts = [next((at for at, token in enumerate(row) if token in stop), 7) for row in whole]
    stopped = npinfer.generate(model, PROMPT, 8, sampler=sampler, stop=stop)
    assert stopped.tokens.tolist() == [row[: max(firsts) + 1] for row in expected]
    assert stopped.cache.length == 5 + max(firsts)  # the last token was never forwarded


def test_true_stops_at_the_tokens_of_the_config(model):
    fourth = generated(model)[0][3]
    ending = Transformer.random(replace(T1, eos_token_ids=(fourth,)), seed=3, precision=FP32)
    first = npinfer.generate(ending, PROMPT[:1], 8, stop=True).tokens.tolist()
    assert first[0][-1] == fourth
    assert fourth not in first[0][:-1]
    assert npinfer.generate(ending, PROMPT[:1], 8).tokens.shape == (1, 8)  # not unless asked for


def test_a_shape_only_run_has_nothing_to_stop_at():
    model = Transformer.shape_only(T1, FP32)
    assert npinfer.generate(model, PROMPT, 4, stop=[0]).cache.length == 5 + 3


def test_stop_tokens_that_are_none(model):
    with pytest.raises(InputError, match=r"T1 says no end-of-text token \(eos_token_ids\); give ids"):
        generated(model, stop=True)
    with pytest.raises(InputError, match="stop token is -1"):
        generated(model, stop=[-1])
    with pytest.raises(InputError, match="stop token is 'x'"):
        generated(model, stop=["x"])


def test_every_step_is_told(model):
    told = []
    tokens = npinfer.generate(model, PROMPT, 4, sampler=Sampler(), on_token=told.append).tokens
    assert np.stack(told, axis=1).tolist() == tokens.tolist()
