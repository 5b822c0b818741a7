"""The closed form of every operation, from the config alone.

`operation_counts` is the text to read: each operation's ten counts as a
formula in the sums of a `Load`.  It shares no code with the rules in
`npinfer.ops`, which see shapes and not configs; that the two agree to the
integer is what the tests show.

The forms are linear in the load, so each is worked once on loads of one
(`coefficients`) and from then on only multiplied out.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodel.forms import Forms
from costmodel.loads import Load
from npinfer.ledger import Counts


def operation_counts(config, precision, load):
    """Counts of every operation under a load, all layers together.

    Parameters
    ----------
    config : ModelConfig
    precision : Precision
    load : Load

    Returns
    -------
    dict
        Operation name -> Counts, in the order they run; `sample` is apart, see `sample_counts`.

    Notes
    -----
    Source of the matrix terms: Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (2 FLOPs for each
    weight and token, and the attention term); the elementwise and byte terms are worked here from
    the definitions of the operations.
    """
    forms = Forms(config, precision, load)
    d, n_heads, n_kv_heads = config.d_model, config.n_heads, config.n_kv_heads
    scores, softmax, mix = forms.attention()
    counts = {
        "embed": forms.embed(),
        "attn_norm": forms.norm("attn_norm"),
        **(_latent_projections(forms) if config.latent else _projections(forms, n_heads, n_kv_heads)),
        "rope": forms.rope(),
        "kv_append": forms.kv_append(),
        "kv_expand": forms.kv_expand(),
        "attn_scores": scores,
        "softmax": softmax,
        "attn_mix": mix,
        "o_proj": forms.product("o_proj"),
        "post_attn_norm": forms.norm("post_attn_norm"),
        "attn_residual": forms.elementwise(d, 2 * d, d),
        "mlp_norm": forms.norm("mlp_norm"),
        "router": forms.router(),
        "gate_proj": forms.mlp_product("gate_proj"),
        "up_proj": forms.mlp_product("up_proj"),
        "mlp_act": forms.mlp_act(),
        "down_proj": forms.mlp_product("down_proj"),
        "post_mlp_norm": forms.norm("post_mlp_norm"),
        "mlp_residual": forms.mlp_residual(),
        "final_norm": forms.norm("final_norm", load.head_rows),
        "lm_head": forms.head(),
    }
    return {op: counted for op, counted in counts.items() if counted is not None}


def _projections(forms, n_heads, n_kv_heads):
    return {
        "q_proj": forms.product("q_proj"),
        "k_proj": forms.product("k_proj"),
        "v_proj": forms.product("v_proj"),
        "q_norm": forms.qk_norm("q_norm", n_heads),
        "k_norm": forms.qk_norm("k_norm", n_kv_heads),
    }


def _latent_projections(forms):
    return {
        "q_proj": forms.product("q_proj"),  # or, through a latent:
        "q_down": forms.product("q_down"),
        "q_norm": forms.norm("q_norm"),
        "q_up": forms.product("q_up"),
        "kv_down": forms.product("kv_down"),
        "k_norm": forms.norm("k_norm"),
    }


def sample_counts(config, precision, batch, sampler=None):
    """Counts of sampling after one forward: the largest of vocab_size logits in each sequence, or a draw from the k largest."""
    flops = config.vocab_size - 1
    if sampler is not None:
        # The largest subtracted, temperature, exp, a running sum (one less), top_p and the draw times a sum.
        flops = 4 * min(sampler.top_k or config.vocab_size, config.vocab_size) + 1
    return Counts(
        elementwise_flops=batch * flops,
        activation_bytes_read=batch * config.vocab_size * precision.activations.bits // 8,
    )


class Cost(NamedTuple):
    """The four numbers that decide how long an operation takes."""

    needed_flops: int  # of matrix products, masked pairs left out
    elementwise_flops: int
    streamed_bytes: int  # weights read, KV read and written: what no kernel can leave in memory
    moved_bytes: int  # those and the activations; scores stay on chip in a fused kernel

    @classmethod
    def of(cls, counts):
        """The cost that `counts` come to."""
        streamed = counts.weight_bytes_read + counts.kv_bytes
        return cls(counts.needed_flops, counts.elementwise_flops, streamed, streamed + counts.activation_bytes)


@lru_cache(maxsize=256)
def coefficients(config, precision):
    """What one of each sum of a load costs, worked from `operation_counts`.

    Returns
    -------
    array of Python ints (n_operations, fields of Counts, sums of Load.flat)
    """
    columns = [list(operation_counts(config, precision, one).values()) for one in Load.ones(config)]
    return np.array(columns, dtype=object).transpose(1, 2, 0)


@lru_cache(maxsize=256)
def _total_terms(config, precision):
    """For each field of `Counts`, ((sum, coefficient), ...) of all operations together, zeros left out."""
    totals = coefficients(config, precision).sum(axis=0)
    return [[(number, coefficient) for number, coefficient in enumerate(row) if coefficient] for row in totals]


def total_counts(config, precision, load):
    """Counts of all operations of a load, as ints or, where it has arrays, as int64 arrays."""
    sums = load.flat()
    fields = [sum([factor * sums[number] for number, factor in terms]) for terms in _total_terms(config, precision)]
    shape = np.broadcast_shapes(*[np.shape(value) for value in sums])
    return Counts(*fields) if shape == () else Counts(*[np.broadcast_to(np.int64(field), shape) for field in fields])


@lru_cache(maxsize=256)
def _cost_matrices(config, precision):
    """Coefficients of the operations' costs, rows one after another: as Python ints, as int64 (None without room), and the
    largest of each sum."""
    by_field = coefficients(config, precision).transpose(1, 0, 2)  # (fields, operations, sums)
    costs = np.stack(Cost.of(Counts(*by_field)), axis=1)  # (operations, fields of Cost, sums)
    matrix = costs.reshape(-1, costs.shape[-1])
    largest = abs(matrix).max(axis=0).tolist()  # some are negative: pairs that a mask throws away
    return matrix, matrix.astype(np.int64) if max(largest) < 2**63 else None, largest


def operation_costs(config, precision, load):
    """`Cost` of each operation of a load of whole numbers: a list of [four Python ints]."""
    matrix, as_int64, largest = _cost_matrices(config, precision)
    sums = load.flat()
    if as_int64 is not None and sum([most * value for most, value in zip(largest, sums)]) < 2**63:
        matrix = as_int64  # the same product, ten times as fast
    return (matrix @ np.array(sums, dtype=matrix.dtype)).reshape(-1, len(Cost._fields)).tolist()
