"""A router's choice and the experts' work against independent answers, as in test_ops_oracle."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npinfer.experts
import reference as reference_model
from npinfer.activations import clamped_swiglu, geglu, swiglu
from npinfer.errors import ShapeError
from npinfer.experts import experts, n_touched, of_touched, route
from npinfer.formats import ALLOWED, FORMATS
from npinfer.ledger import Counts
from npinfer.parts import Experts
from npinfer.specs import spec
from npinfer.weights import Matrix
from oracle import CHECKS, FP32, Case, a_matrix, dims, matrix_formats, multiplied, numbers, stored, vectors_of
from tally import values

weight_formats = st.sampled_from([FORMATS[name] for name in ALLOWED["weights"]])
activation_formats = st.sampled_from([FORMATS[name] for name in ALLOWED["activations"]])
CLAMP = {"limit": 1.5, "alpha": 1.702}
CLAMPED = clamped_swiglu.fixed(**CLAMP)
ACTS = {swiglu: "swiglu", geglu: "geglu", CLAMPED: "clamped_swiglu"}


@pytest.fixture(scope="module", autouse=True)
def selection_is_free():
    """What is sorted to choose experts works on values, so that the oracle does not count its comparisons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npinfer.experts, "largest", lambda scores, k, real=npinfer.experts.largest: real(values(scores), k))
        yield


# ---- cases


@st.composite
def settings_of_experts(draw):
    """`Experts` with every gate; groups only where they are."""
    gate, size = draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid"])), draw(st.integers(2, 4))
    n_groups = draw(st.integers(1, 3)) if gate == "sigmoid" else 1
    n_groups_active = draw(st.integers(1, n_groups))
    return Experts(
        n_experts=size * n_groups,
        n_active=draw(st.integers(1, size * n_groups_active)),
        d_ff=draw(dims),
        gate=gate,
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])) if gate == "sigmoid" else 1.0,
        n_groups=n_groups,
        n_groups_active=n_groups_active,
        router_bias=draw(st.booleans()),
    )


@st.composite
def routes(draw):
    n, d, settings = draw(dims), draw(dims), draw(settings_of_experts())
    pairs, w = a_matrix(["router"], [settings.n_experts], d, draw(matrix_formats), settings.router_bias)
    corrected = settings.gate == "sigmoid"

    def reference(x, w, correction):
        choices = [reference_model.choice_of(list(row), correction, settings) for row in multiplied(x, w)]
        return [list(part) for part in zip(*choices)]

    return Case(
        route,
        (spec((n, d), FP32), pairs, spec((settings.n_experts,), FP32, "weight", "router") if corrected else None),
        (numbers(n, d), w, np.float32(0.3) * numbers(settings.n_experts) if corrected else None),
        {"experts": settings},
        reference,
    )


@st.composite
def mixtures(draw):
    n, d, settings, act = draw(dims), draw(dims), draw(settings_of_experts()), draw(st.sampled_from(list(ACTS)))
    format_, bias, f, k = draw(matrix_formats), draw(st.booleans()), settings.d_ff, settings.n_active
    all_ids = range(settings.n_experts)
    ids = np.array([draw(st.permutations(all_ids))[:k] for _ in range(n)])
    gate_up = [a_matrix(["gate_proj", "up_proj"], [f, f], d, format_, bias, seed) for seed in all_ids]
    down = [a_matrix(["down_proj"], [d], f, format_, bias, seed + 100) for seed in all_ids]

    def reference(x, weights, ids, gate_up, down):
        definition, clamp = reference_model.ACTS[ACTS[act]], CLAMP.values() if act is CLAMPED else ()
        out = np.zeros((n, d))
        for token, slot in np.ndindex(n, k):
            expert = ids[token, slot]
            gate, up = np.split(multiplied(x[token : token + 1], gate_up[expert])[0], 2)
            hidden = np.array([[definition(g, u, *clamp) for g, u in zip(gate, up)]])
            out[token] += weights[token, slot] * multiplied(hidden, down[expert])[0]
        return out

    return Case(
        experts,
        (spec((n, d), FP32), spec((n, k), FP32), spec((n, k), None, "token"), gate_up[0][0], down[0][0]),
        (numbers(n, d), numbers(n, k), ids, *[tuple([matrix for _, matrix in each]) for each in (gate_up, down)]),
        {"act": act, "experts": settings, "touched": len({int(expert) for expert in ids.ravel()})},
        reference,
    )


CASES = {"route": routes(), "experts": mixtures()}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@given(data=st.data())
def test_every_operation(cases, check, data):
    check(data.draw(cases))


@given(ids=st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=6))
def test_touched_experts_are_counted_once(ids):
    assert n_touched(np.array(ids)) == len({expert for row in ids for expert in row})


# ---- known answers


def routed(scores, **settings):
    """Choose with a router that hands its input on."""
    scores = np.array(scores, np.float32)
    n_experts = scores.shape[1]
    w = Matrix(np.eye(n_experts, dtype=np.float32), None, None, (slice(0, n_experts),), FP32, False)
    correction = np.array(settings.pop("correction", np.zeros(n_experts)), np.float32)
    settings = Experts(n_experts=n_experts, d_ff=1, **settings)
    return route.__wrapped__(scores, w, correction if settings.gate == "sigmoid" else None, experts=settings)


def test_the_three_gates_of_ln_1_2_3_and_4():
    """Shares of a softmax over ln n are n over their sum: 4/10 and 3/10, over the chosen 4/7 and 3/7."""
    scores = [np.log([1, 4, 2, 3])]
    weights, ids = routed(scores, n_active=2, gate="softmax", renormalise=False)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 10, 3 / 10]], rtol=1e-6)
    for gate in ("softmax", "topk_softmax"):  # with renormalising they are the same
        np.testing.assert_allclose(routed(scores, n_active=2, gate=gate)[0], [[4 / 7, 3 / 7]], rtol=1e-6)
    # sigmoid(ln n) = n / (n + 1): 4/5 and 3/4, over their sum 31/20, times 2
    weights, _ = routed(scores, n_active=2, gate="sigmoid", scale=2.0)
    np.testing.assert_allclose(weights, [[2 * 16 / 31, 2 * 15 / 31]], rtol=1e-6)


def test_a_correction_changes_the_choice_and_not_the_weights():
    weights, ids = routed([np.log([1, 4, 2, 3])], n_active=1, gate="sigmoid", renormalise=False, correction=[9, 0, 0, 0])
    assert ids.tolist() == [[0]]
    np.testing.assert_allclose(weights, [[0.5]], rtol=1e-6)


def test_a_group_is_as_good_as_its_best_two():
    """The best expert is in the first group, the best pair in the second."""
    scores = [[9.0, -9.0, -9.0, 3.0, 3.0, -9.0]]
    assert routed(scores, n_active=2, gate="sigmoid", n_groups=2, n_groups_active=1)[1].tolist() == [[3, 4]]
    assert routed(scores, n_active=2, gate="sigmoid")[1].tolist() == [[0, 3]]


def test_groups_that_are_not_chosen_are_left_out():
    """Also where corrections take the scores of the chosen group below zero."""
    settings = {"n_active": 2, "gate": "sigmoid", "n_groups": 2, "n_groups_active": 1}
    for correction in (0, -5):
        assert routed([[3.0, 3.0, 0.0, 0.0]], correction=[correction] * 4, **settings)[1].tolist() == [[0, 1]]


def test_scores_beyond_the_range_of_exp_have_their_limits():
    weights, ids = routed([[-1e4, 1e4, 0]], n_active=3, gate="sigmoid", renormalise=False)
    assert ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(weights, [[1, 0.5, 0]])
    for gate in ("softmax", "topk_softmax"):
        np.testing.assert_allclose(routed([[-1e4, 1e4, 0]], n_active=3, gate=gate)[0], [[1, 0, 0]])


def test_of_equal_scores_the_first_are_chosen():
    assert routed([[1, 1, 1, 1]], n_active=2)[1].tolist() == [[0, 1]]


# ---- bytes and FLOPs: the contract, from shapes and bits worked out here


@given(n=dims, d=st.sampled_from([1, 4, 129]), settings=settings_of_experts(), w=weight_formats, a=activation_formats)
def test_router_reads_its_weights_and_writes_every_score(n, d, settings, w, a):
    n_experts, k, vectors = settings.n_experts, settings.n_active, vectors_of(w)
    matrix = spec((n_experts, d), w, "weight", "router")
    bias = spec((n_experts,), vectors, "weight", "router") if settings.router_bias else None
    correction = spec((n_experts,), vectors, "weight", "router_correction") if settings.gate == "sigmoid" else None
    (weights, ids), ((op, counts),) = route.rule(spec((n, d), a), ((matrix, bias),), correction, experts=settings)
    gate = {
        "softmax": 5 * n_experts - 2 + (2 * k - 1) * settings.renormalise,
        "topk_softmax": 5 * k - 2,
        "sigmoid": 4 * n_experts + settings.n_groups * (settings.n_groups > 1) + 2 * k * settings.renormalise + k,
    }[settings.gate]
    widening = {"int8": n * n_experts, "int4": d * n_experts}.get(str(w), 0)
    n_vectors = (bias is not None) + (correction is not None)
    assert (op, counts) == (
        "router",
        Counts(
            matmul_flops=2 * n * d * n_experts,
            elementwise_flops=n * gate + widening + (n * n_experts if bias else 0),
            weight_bytes_read=stored((n_experts, d), w) + n_vectors * stored((n_experts,), vectors),
            activation_bytes_read=stored((n, d), a),
            activation_bytes_written=stored((n, n_experts), a),
        ),
    )
    assert (weights.shape, weights.format, ids.shape, ids.role) == ((n, k), a, (n, k), "token")


def touched_of(total, n, settings, touched):
    """What of all experts' `total` is touched, exactly."""
    share = {
        "all": Fraction(1),
        "expected": 1 - (1 - Fraction(settings.n_active, settings.n_experts)) ** n,
    }.get(touched, Fraction(touched if isinstance(touched, int) else 0, settings.n_experts))
    return total * share


@given(
    n=dims,
    d=st.sampled_from([1, 4, 129]),
    settings=settings_of_experts(),
    w=weight_formats,
    a=activation_formats,
    bias=st.booleans(),
    touched=st.sampled_from(["all", "expected"]) | st.integers(1, 4),
)
def test_experts_have_the_flops_of_the_chosen_and_the_weights_of_the_touched(n, d, settings, w, a, bias, touched):
    f, k, vectors = settings.d_ff, settings.n_active, vectors_of(w)
    if isinstance(touched, int):
        touched = min(touched, settings.n_experts)

    def pair(name, d_out, d_in):
        return spec((d_out, d_in), w, "weight", name), spec((d_out,), vectors, "weight", name) if bias else None

    gate_up, down = (pair("gate_proj", f, d), pair("up_proj", f, d)), (pair("down_proj", d, f),)
    x, weights, ids = spec((n, d), a), spec((n, k), a), spec((n, k), None, "token")
    static = {"act": geglu, "experts": settings, "touched": touched}
    out, costs = experts.rule(x, weights, ids, gate_up, down, **static)
    assert (out.shape, out.format) == ((n, d), a)
    assert [op for op, _ in costs] == ["gate_proj", "up_proj", "mlp_act", "down_proj"]
    counts, hidden, rows, mixing = dict(costs), stored((n * k, f), a), stored((n, d), a), n * (2 * k - 1) * d
    for op, (d_out, d_in), read, written, more in (
        ("gate_proj", (f, d), rows, hidden, 0),
        ("up_proj", (f, d), rows, hidden, 0),
        ("down_proj", (d, f), hidden + stored((n, k), a), rows, mixing),
    ):
        one = stored((d_out, d_in), w) + (stored((d_out,), vectors) if bias else 0)
        widening = n * k * d_out if w == "int8" else 0
        if w == "int4":
            widening = touched_of(settings.n_experts * d_out * d_in, n, settings, touched)
        # A share is rounded once, to the nearest; what lies half way may go either way in floating point.
        assert abs(counts[op].weight_bytes_read - touched_of(settings.n_experts * one, n, settings, touched)) <= Fraction(1, 2)
        assert abs(counts[op].elementwise_flops - more - n * k * d_out * bias - widening) <= Fraction(1, 2)
        assert counts[op]._replace(weight_bytes_read=0, elementwise_flops=0) == Counts(
            matmul_flops=2 * n * k * d_out * d_in, activation_bytes_read=read, activation_bytes_written=written
        )
    assert counts["mlp_act"] == Counts(
        elementwise_flops=10 * n * k * f, activation_bytes_read=2 * hidden, activation_bytes_written=hidden
    )


def test_expected_share_by_hand():
    """Two of eight for three tokens: 1 - (6/8)^3 = 37/64 of 8 * 100 bytes is 462.5, to even 462."""
    settings = Experts(n_experts=8, n_active=2, d_ff=1)
    assert of_touched(100, 3, settings, "expected") == 462
    assert of_touched(100, 3, settings, "all") == 800
    assert of_touched(100, 3, settings, 5) == 500
    assert of_touched(100, 10**6, settings, "expected") == 800
    assert of_touched(100, 1, Experts(n_experts=8, n_active=8, d_ff=1), "expected") == 800


@pytest.mark.parametrize("shapes, message", [
    (((2, 2), (2, 3)), "experts: weights (2, 2) and ids (2, 3), expected (2, 2)"),
    (((1, 2), (1, 2)), "experts: weights (1, 2) and ids (1, 2), expected (2, 2)"),
])
def test_choices_of_another_shape_are_refused(shapes, message):
    weights, ids = shapes
    gate_up, down = a_matrix(["gate_proj", "up_proj"], [3, 3], 4)[0], a_matrix(["down_proj"], [4], 3)[0]
    static = {"act": swiglu, "experts": Experts(n_experts=4, n_active=2, d_ff=3), "touched": "all"}
    with pytest.raises(ShapeError, match=re.escape(message)):
        experts.rule(spec((2, 4), FP32), spec(weights, FP32), spec(ids, None, "token"), gate_up, down, **static)


def test_a_router_of_another_width_is_refused():
    pairs, _ = a_matrix(["router"], [4], 3)
    with pytest.raises(ShapeError, match=re.escape("router: x has d_in=5 but w is (4, 3), expected (4, 5)")):
        route.rule(spec((2, 5), FP32), pairs, None, experts=Experts(n_experts=4, n_active=2, d_ff=3))
