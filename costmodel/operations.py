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

from costmodel.loads import Attention, Load, layers_by_window
from npinfer.ledger import Counts

SCALE_BYTES = 2  # an fp16 number


def stored_matrix_bytes(precision, d_out, d_in):
    """Bytes of a (d_out, d_in) matrix: its elements, rounded up to whole bytes, and its scales."""
    if precision.bits_per_weight is not None:
        return _ceil_bytes(precision.bits_per_weight, d_out * d_in)  # scales included in the average
    scales = {"int8": d_out, "int4": d_out * -(-d_in // 128)}.get(precision.weights, 0)
    return _ceil_bytes(precision.weights.bits, d_out * d_in) + SCALE_BYTES * scales


def stored_rows_bytes(precision, d_model, n_rows):
    """Bytes of so many rows of the embedding, each with its scales; `n_rows` may be an array."""
    if precision.bits_per_weight is not None:
        return _ceil_bytes(precision.bits_per_weight, n_rows * d_model)
    scales = {"int8": 1, "int4": -(-d_model // 128)}.get(precision.weights, 0)
    return _ceil_bytes(precision.weights.bits, n_rows * d_model) + SCALE_BYTES * scales * n_rows


def stored_vector_bytes(precision, size):
    """Bytes of a gain or a bias, which stay at 16 bits beside matrices of fewer."""
    return size * max(16, precision.weights.bits) // 8


def kv_row_bytes(config, precision):
    """Bytes of one token's key, or value, in one layer: an int8 row has a scale for each head."""
    scales = config.n_kv_heads if precision.kv == "int8" else 0
    return config.n_kv_heads * config.head_dim * precision.kv.bits // 8 + SCALE_BYTES * scales


@lru_cache(maxsize=256)
def _exact_ratio(bits):
    from decimal import Decimal

    return Decimal(repr(float(bits))).as_integer_ratio()


def _ceil_bytes(bits, n_elements):
    if isinstance(bits, int):
        return -(-n_elements * bits // 8)
    exact, per = _exact_ratio(bits)
    if isinstance(n_elements, np.ndarray):  # an exact numerator may have no room in int64
        return (-(-n_elements.astype(object) * exact // (8 * per))).astype(np.int64)
    return -(-n_elements * exact // (8 * per))


class _Forms:
    """The shapes that the closed forms of operations come in, under one load."""

    def __init__(self, config, precision, load):
        self.config, self.precision, self.load = config, precision, load
        self.act = precision.activations.bits // 8
        self.scaled = precision.bits_per_weight is None and precision.weights in ("int8", "int4")

    def embed(self):
        d = self.config.d_model
        return Counts(
            elementwise_flops=self.scaled * self.load.tokens * d,
            weight_bytes_read=self.load.embedding_bytes,
            activation_bytes_written=self.load.tokens * d * self.act,
        )

    def projection(self, d_in, d_out, bias=False):
        """A matrix of every layer, at every token."""
        return self.matrix(d_in, d_out, self.load.tokens, bias) * self.config.n_layers

    def matrix(self, d_in, d_out, rows, bias=False):
        """A product with one matrix, at so many positions."""
        elementwise = bias * rows * d_out
        if self.scaled:  # an int8 scale for each output, an int4 weight widened one by one
            elementwise += rows * d_out if self.precision.weights == "int8" else self.load.forwards * d_in * d_out
        weights = stored_matrix_bytes(self.precision, d_out, d_in) + bias * stored_vector_bytes(self.precision, d_out)
        return Counts(
            matmul_flops=2 * rows * d_in * d_out,
            elementwise_flops=elementwise,
            weight_bytes_read=self.load.forwards * weights,
            activation_bytes_read=rows * d_in * self.act,
            activation_bytes_written=rows * d_out * self.act,
        )

    def norm(self, rows):
        """An RMS norm at so many positions."""
        d = self.config.d_model
        return Counts(
            elementwise_flops=rows * (4 * d + 2),
            weight_bytes_read=self.load.forwards * stored_vector_bytes(self.precision, d),
            activation_bytes_read=rows * d * self.act,
            activation_bytes_written=rows * d * self.act,
        )

    def elementwise(self, flops, n_read, n_written):
        """So many FLOPs, and activations read and written, at every token of every layer."""
        return Counts(
            elementwise_flops=self.load.tokens * flops,
            activation_bytes_read=self.load.tokens * n_read * self.act,
            activation_bytes_written=self.load.tokens * n_written * self.act,
        ) * self.config.n_layers

    def attention(self):
        """attn_scores, softmax and attn_mix: the only operations in which a window shows."""
        n_heads, head_dim = self.config.n_heads, self.config.head_dim
        queries = self.load.tokens * n_heads * head_dim * self.act
        scores = softmax = mix = Counts()
        for (_, times), seen in zip(layers_by_window(self.config), self.load.attention):
            n_scores = n_heads * seen.pairs
            widening = n_scores if self.precision.kv == "int8" else 0
            product = Counts(
                matmul_flops=2 * n_scores * head_dim,
                masked_flops=2 * n_heads * head_dim * seen.masked,
                kv_bytes_read=seen.keys * kv_row_bytes(self.config, self.precision),
            )
            written = Counts(activation_bytes_read=queries, score_bytes_written=n_scores * self.act)
            read = Counts(activation_bytes_written=queries, score_bytes_read=n_scores * self.act)
            scores += (product + written + Counts(elementwise_flops=n_scores + widening)) * times
            softmax += Counts(
                elementwise_flops=5 * n_scores - 2 * n_heads * self.load.tokens,
                score_bytes_read=n_scores * self.act,
                score_bytes_written=n_scores * self.act,
            ) * times
            mix += (product + read + Counts(elementwise_flops=widening)) * times
        return scores, softmax, mix


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
    forms = _Forms(config, precision, load)
    n_layers, d, d_ff = config.n_layers, config.d_model, config.d_ff
    d_q, d_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    scores, softmax, mix = forms.attention()
    kv_written = Counts(kv_bytes_written=load.tokens * 2 * kv_row_bytes(config, precision) * n_layers)
    return {
        "embed": forms.embed(),
        "attn_norm": forms.norm(load.tokens) * n_layers,
        "q_proj": forms.projection(d, d_q, config.qkv_bias),
        "k_proj": forms.projection(d, d_kv, config.qkv_bias),
        "v_proj": forms.projection(d, d_kv, config.qkv_bias),
        "rope": forms.elementwise(3 * (d_q + d_kv), d_q + d_kv, d_q + d_kv),
        "kv_append": forms.elementwise(0, 2 * d_kv, 0) + kv_written,
        "attn_scores": scores,
        "softmax": softmax,
        "attn_mix": mix,
        "o_proj": forms.projection(d_q, d, config.o_bias),
        "attn_residual": forms.elementwise(d, 2 * d, d),
        "mlp_norm": forms.norm(load.tokens) * n_layers,
        "gate_proj": forms.projection(d, d_ff, config.mlp_bias),
        "up_proj": forms.projection(d, d_ff, config.mlp_bias),
        "mlp_act": forms.elementwise(4 * d_ff, 2 * d_ff, d_ff),
        "down_proj": forms.projection(d_ff, d, config.mlp_bias),
        "mlp_residual": forms.elementwise(d, 2 * d, d),
        "final_norm": forms.norm(load.head_rows),
        "lm_head": forms.matrix(d, config.vocab_size, load.head_rows),
    }


def sample_counts(config, precision, batch):
    """Counts of greedy sampling after one forward: the largest of vocab_size logits, in each sequence."""
    return Counts(
        elementwise_flops=batch * (config.vocab_size - 1),
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
    n_windows = len(layers_by_window(config))
    columns = []
    for one in np.eye(4 + 3 * n_windows, dtype=int).tolist():
        attention = tuple([Attention(*one[4 + 3 * i : 7 + 3 * i]) for i in range(n_windows)])
        columns.append(list(operation_counts(config, precision, Load(*one[:4], attention)).values()))
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
    """Coefficients of the operations' costs, rows one after another: as Python ints, as int64, and up to which sum int64
    has room for every product."""
    by_field = coefficients(config, precision).transpose(1, 0, 2)  # (fields, operations, sums)
    costs = np.stack(Cost.of(Counts(*by_field)), axis=1)  # (operations, fields of Cost, sums)
    matrix = costs.reshape(-1, costs.shape[-1])
    largest_row = abs(matrix).sum(axis=1).max()  # some are negative: pairs that a mask throws away
    return matrix, matrix.astype(np.int64) if largest_row < 2**63 else None, (2**63 - 1) // largest_row


def operation_costs(config, precision, load):
    """`Cost` of each operation of a load of whole numbers: a list of [four Python ints]."""
    matrix, as_int64, largest_sum = _cost_matrices(config, precision)
    sums = load.flat()
    if as_int64 is not None and max(sums) <= largest_sum:
        matrix = as_int64  # the same product, ten times as fast
    return (matrix @ np.array(sums, dtype=matrix.dtype)).reshape(-1, len(Cost._fields)).tolist()
