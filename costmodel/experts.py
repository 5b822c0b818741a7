"""Mixture of experts: how much of the experts' weights a forward reads.

The one count that is not linear in the tokens: more of them touch more
experts, but never more than there are.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodel.arguments import whole_numbers
from costmodel.tensors import tensors
from npinfer.errors import InputError

PROJECTIONS = "gate_proj", "up_proj", "down_proj"


class Touched(NamedTuple):
    """What is read of one projection of the experts, summed over layers and forwards.

    Attributes
    ----------
    nbytes : stored bytes, biases included
    widened : int4 weights, which are widened one by one before they multiply
    """

    nbytes: int
    widened: int


def projections(config):
    """Matrices that each expert has, as `Tensor`s; none in a model without experts."""
    table = tensors(config)
    return [table[f"expert.{name}"] for name in PROJECTIONS if f"expert.{name}" in table]


@lru_cache(maxsize=256)
def one_expert(config, precision):
    """`Touched` of one expert by itself: for each of `projections` a list, with one for each layer that has experts."""
    by_projection = []
    for matrix in projections(config):
        bias = tensors(config).get(f"expert.{matrix.name}.bias")
        layers = []
        for layer in matrix.layers:
            (format_,) = matrix.formats(precision, (layer,))
            nbytes = matrix.nbytes(format_)
            if bias is not None:
                (bias_format,) = bias.formats(precision, (layer,))
                nbytes += bias.nbytes(bias_format)
            layers.append(Touched(nbytes, matrix.shape[0] * matrix.shape[1] if format_ == "int4" else 0))
        by_projection.append(layers)
    return by_projection


@lru_cache(maxsize=256)
def _by_size(config, precision):
    """As `one_expert`, layers of one size together: of each field of `Touched`, [(size, n_layers), ...]."""
    return [[list(Counter(sizes).items()) for sizes in zip(*layers)] for layers in one_expert(config, precision)]


def expected_share(experts, n_tokens):
    """Share of a layer's experts that `n_tokens` (maybe an array) touch if all are chosen equally often: 1 - (1 - k/E)**N."""
    missed = 1 - experts.n_active / experts.n_experts
    if isinstance(n_tokens, np.ndarray):  # NumPy's power may differ from Python's in the last digit
        many = 1
        while 1 - missed**many < 1:
            many *= 2  # tokens from which on the share is 1, to the last digit
        values, where = np.unique(np.minimum(n_tokens, many), return_inverse=True)
        return np.array([1 - missed**n for n in values.tolist()])[where].reshape(n_tokens.shape)
    return 1 - missed**n_tokens


def touched(config, precision, n_tokens, rule="expected"):
    """What one forward over `n_tokens` reads of the experts.

    Parameters
    ----------
    n_tokens : int or integer array
        Of all sequences together.
    rule : {"expected", "all"} or list of int
        Expected where experts are chosen equally often, rounded in each layer
        and projection; or all; or the number that each layer touched.

    Returns
    -------
    tuple
        `Touched` of each of `projections`.
    """
    if config.experts is None and rule in ("expected", "all"):
        return ()
    rule = checked_rule(config, rule)
    if isinstance(rule, list):
        return tuple(
            [
                Touched(*[sum([n * size for n, size in zip(rule, sizes)]) for sizes in zip(*layers)])
                for layers in one_expert(config, precision)
            ]
        )
    by_size = _by_size(config, precision)
    share = expected_share(config.experts, n_tokens) if rule == "expected" and by_size else None

    def total(sizes):
        return sum([read(config.experts, size, share) * n_layers for size, n_layers in sizes])

    return tuple([Touched(*map(total, fields)) for fields in by_size])


def read(experts, size, share):
    """A share, rounded, of what all experts of a layer have, `size` each; all of it for None."""
    size *= experts.n_experts
    return size if share is None else _rounded(size * share)


def observed(ledger, config, precision, forward):
    """How many experts each sparse layer read in one forward of a numeric run: a list, as `touched` takes it."""
    sparse = [layer for layer, kind in enumerate(config.kinds) if kind.sparse]
    if not sparse:
        return []
    one = dict(zip(sparse, one_expert(config, precision)[-1]))  # of down_proj
    found = {}
    for entry in ledger.entries(forward):
        if entry.op == "down_proj" and entry.layers[0] in one:
            # Shared experts come after those that are chosen, under the same name.
            found.setdefault(entry.layers[0], entry.counts.weight_bytes_read // one[entry.layers[0]].nbytes)
    return [found[layer] for layer in sparse]


@lru_cache(maxsize=256)
def active_bytes(config, precision):
    """Stored bytes of the k experts of one token, in all layers."""
    return config.experts.n_active * sum([one.nbytes for layers in one_expert(config, precision) for one in layers])


def surplus_bytes(config, precision, load):
    """Bytes of experts in a load beyond those that no routing avoids: of one token's experts in each forward."""
    if not load.experts:
        return 0
    return sum([each.nbytes for each in load.experts]) - load.forwards * active_bytes(config, precision)


def checked_rule(config, rule):
    """`rule` as `touched` takes it, or an `InputError` that says what is wrong with it."""
    if isinstance(rule, str) and rule in ("expected", "all"):
        return rule
    if not isinstance(rule, list | tuple):
        raise InputError(f"experts_touched is {rule!r}, expected 'expected', 'all' or a list of numbers, one a sparse layer")
    n_layers = sum([kind.sparse for kind in config.kinds])
    if len(rule) != n_layers:
        raise InputError(f"experts_touched has {len(rule)} numbers, expected {n_layers}, one for each layer that has experts")
    numbers = [whole_numbers("experts_touched", n, 1) for n in rule]
    if numbers and max(numbers) > config.experts.n_experts:
        raise InputError(f"experts_touched is {max(numbers)}, expected at most n_experts {config.experts.n_experts}")
    return numbers


def _rounded(value):
    """The nearest whole number, the even one of two."""
    return np.rint(value).astype(np.int64) if isinstance(value, np.ndarray) else round(value)
