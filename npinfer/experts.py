"""A mixture of experts: which experts a token goes to, and what they make of it.

Conventions are those of `npinfer.ops`; k experts of E run for each token.  A
numeric run reads the experts that its tokens touch.  A shape-only run knows no
tokens and takes a declared number: "expected", as if every token chose its k at
random, or "all".
"""

import numpy as np

from npinfer.errors import ShapeError
from npinfer.ledger import cost
from npinfer.operation import operation
from npinfer.products import product, projection_flops
from npinfer.specs import spec


def _route_rule(x, w, correction, experts):
    n, d_in = x.shape
    ((matrix, bias),) = w
    n_experts, k = experts.n_experts, experts.n_active
    if matrix.shape != (n_experts, d_in):
        raise ShapeError(f"router: x has d_in={d_in} but w is {matrix.shape}, expected ({n_experts}, {d_in})")
    flops = projection_flops(n, matrix, bias)
    flops["elementwise_flops"] += n * _gate_flops(experts)
    reads = [part for part in (x, matrix, bias, correction) if part is not None]
    weights, ids = spec((n, k), x.format), spec((n, k), None, "token")
    return (weights, ids), (("router", cost(reads, [spec((n, n_experts), x.format)], **flops)),)


def _gate_flops(experts):
    """Elementwise FLOPs of one token's choice; what is sorted and selected is free."""
    n_experts, k = experts.n_experts, experts.n_active
    if experts.gate == "topk_softmax":
        return 5 * k - 2
    if experts.gate == "softmax":
        return 5 * n_experts - 2 + (2 * k - 1 if experts.renormalise else 0)  # sum k - 1, divide k
    grouping = experts.n_groups if experts.n_groups > 1 else 0  # the sum of each group's best two
    # exp, + 1, divide, correction; sum k - 1, + 1e-20, divide k; scale k
    return 4 * n_experts + grouping + (2 * k if experts.renormalise else 0) + k


@operation(_route_rule)
def route(x, w, correction, *, experts):
    """The k experts of each token, and their weights.

    Parameters
    ----------
    x : Array (N, d_model)
    w : Array of the router's weights (E, d_model)
    correction : Array (E,) or NOTHING
        Added to the scores of a sigmoid gate for the choice, not for the weights.
    experts : npinfer.parts.Experts

    Returns
    -------
    weights : Array (N, k)
    ids : Array (N, k) of ints
    """
    scores = product(x, w)
    k = experts.n_active
    if experts.gate == "topk_softmax":
        ids = largest(scores, k)
        return _softmax(np.take_along_axis(scores, ids, axis=1)), ids
    if experts.gate == "softmax":
        scores = _softmax(scores)
        ids = largest(scores, k)
        weights = np.take_along_axis(scores, ids, axis=1)
        if experts.renormalise:
            weights /= weights.sum(axis=1, keepdims=True)
        return weights, ids
    with np.errstate(over="ignore"):
        scores = 1 / (np.exp(-scores) + 1)
    ids = largest(_of_chosen_groups(scores + correction, experts), k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if experts.renormalise:
        weights /= weights.sum(axis=1, keepdims=True) + 1e-20
    weights *= experts.scale
    return weights, ids


def _softmax(scores):
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def _of_chosen_groups(scores, experts):
    """Scores with those of all but the best groups set to -inf; a group is as good as its best two.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, section 2.1.2, and transformers,
    src/transformers/models/deepseek_v3/modeling_deepseek_v3.py.
    """
    if experts.n_groups == 1:
        return scores
    by_group = scores.reshape(len(scores), experts.n_groups, -1)
    best = np.take_along_axis(by_group, largest(by_group, 2), axis=2)
    chosen = largest(best[..., 0] + best[..., 1], experts.n_groups_active)
    kept = np.zeros((len(scores), experts.n_groups), bool)
    np.put_along_axis(kept, chosen, True, axis=1)
    return np.where(kept[..., None], by_group, np.float32(-np.inf)).reshape(scores.shape)


def largest(scores, k):
    """Indices of the k largest along the last axis, the largest first, of equal ones the first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def of_touched(one, n_tokens, experts, touched):
    """What the experts that `n_tokens` touch sum up to, if one comes to `one`: bytes read, or weights widened.

    Parameters
    ----------
    touched : int or {"expected", "all"}
        Their number as observed; or all; or expected, E * (1 - (1 - k/E)**N), rounded once at the end.
    """
    if touched == "all":
        return experts.n_experts * one
    if touched == "expected":
        return round(experts.n_experts * one * (1 - (1 - experts.n_active / experts.n_experts) ** n_tokens))
    return touched * one


def _experts_rule(x, weights, ids, gate_up, down, act, experts, touched):
    (n, d), k = x.shape, experts.n_active
    if weights.shape != (n, k) or ids.shape != (n, k):
        raise ShapeError(f"experts: weights {weights.shape} and ids {ids.shape}, expected ({n}, {k})")
    rows, out = spec((n * k, experts.d_ff), x.format), spec((n, d), x.format)

    def projection(matrix, bias, reads, written):
        flops = projection_flops(n * k, matrix, bias)
        if matrix.format.group:  # widened once for each expert that is touched, however many tokens it has
            widening = matrix.shape[0] * matrix.shape[1]
            flops["elementwise_flops"] += of_touched(widening, n, experts, touched) - widening
        counts = cost(reads, [written], **flops)
        stored = matrix.nbytes + (0 if bias is None else bias.nbytes)
        return matrix.name, counts._replace(weight_bytes_read=of_touched(stored, n, experts, touched))

    mixing = cost(elementwise_flops=n * (2 * k - 1) * d)  # weighting k rows, and their sum
    name, counts = projection(*down[0], [rows, weights], out)
    projections = [projection(*part, [x], rows) for part in gate_up]
    acted = act.rule(*[rows] * len(gate_up))[1]
    return out, (*projections, *acted, (name, counts + mixing))


@operation(_experts_rule)
def experts(x, weights, ids, gate_up, down, *, act, experts, touched):
    """The weighted sum of what the chosen experts make of each token: (N, d_model) -> (N, d_model).

    Parameters
    ----------
    x : Array (N, d_model)
    weights, ids : Array (N, k)
        From `route`.
    gate_up, down : Array of weights
        Spec: of one expert; data: a tuple with a `npinfer.weights.Matrix` for each expert.
    act : operation
        Of `npinfer.activations`, its settings fixed.
    experts : npinfer.parts.Experts
    touched : int or {"expected", "all"}
        How many experts are read.

    Notes
    -----
    gate_proj, up_proj and down_proj have the FLOPs of every token's k experts
    and the weights of the distinct experts touched: few tokens read few of them.
    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", arXiv:1701.06538, eq. 1.
    """
    parts = np.empty((*ids.shape, x.shape[1]), x.dtype)
    for expert in np.unique(ids):
        tokens, slots = np.nonzero(ids == expert)
        hidden = product(x[tokens], gate_up[expert])
        hidden = act.__wrapped__(*[hidden[part] for part in gate_up[expert].splits])
        parts[tokens, slots] = product(hidden, down[expert])
    parts *= weights[..., None]
    return parts.sum(axis=1)


def n_touched(ids):
    """Number of distinct experts among the ids of a numeric run."""
    return len(np.unique(ids))
