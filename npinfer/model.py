"""The transformer: the equations of a decoder, written once for both modes.

`Transformer._forward` is the model.  On real arrays it computes, on arrays
without data it only counts, and the text is the same: what runs and what is
counted cannot differ.
"""

from dataclasses import replace

import numpy as np

from npinfer.checks import one_of, whole
from npinfer.config import ModelConfig
from npinfer.errors import CacheError, InputError
from npinfer.formats import Precision
from npinfer.kvcache import KVCache
from npinfer.layers import Here
from npinfer.ledger import forward, in_layers
from npinfer.operation import NOTHING
from npinfer.rope import RopeTable
from npinfer.seeded import random_source
from npinfer.specs import Array, last_rows, spec, view
from npinfer.weights import build


class Transformer:
    """A decoder-only transformer; make one with `random`, `shape_only` or `from_checkpoint`.

    Attributes
    ----------
    config : ModelConfig
    precision : Precision
    numeric : bool
        Whether it computes, or counts only.
    experts : str
        Which share of its experts a shape-only run reads: "expected" or "all".
    """

    def __init__(self, config, precision, source=None, stored=None, experts="expected", pack=False, gain_offset=0.0):
        if not isinstance(config, ModelConfig) or not isinstance(precision, Precision):
            raise InputError(
                f"a model takes a ModelConfig and a Precision, not {type(config).__name__} and "
                f"{type(precision).__name__}; see npinfer.preset and npinfer.Precision"
            )
        self.config, self.precision, self.numeric, self.experts = config, precision, source is not None, experts
        if self.numeric:
            precision.check_numeric(stored)
        self.weights = build(config, precision, source, one_of("experts", experts, ("expected", "all")), pack, gain_offset)
        self.rope = RopeTable(config, self.numeric)
        self._windows = frozenset(config.windows)
        self._fingerprint = None

    @classmethod
    def random(cls, config, seed=0, precision=Precision(), pack=False):
        """A numeric model with normally distributed weights; the same seed gives the same model.

        Parameters
        ----------
        pack : bool
            Whether matrices are kept in their format and widened in the
            products: less memory, slower steps, the same logits.
        """
        return cls(config, precision, random_source(whole("seed", seed, least=0)), pack=pack)

    @classmethod
    def shape_only(cls, config, precision=Precision(), experts="expected"):
        """A model whose arrays have a shape and no data: exact counts, no memory, no arithmetic.

        Parameters
        ----------
        experts : {"expected", "all"}
            Which share of a layer's experts a forward reads, there being no
            tokens that choose: as if they chose evenly, or all.
        """
        return cls(config, precision, experts=experts)

    @classmethod
    def from_checkpoint(cls, folder, precision=None, pack=False):
        """A numeric model from a published checkpoint.

        Parameters
        ----------
        folder : path
            Holds config.json and *.safetensors, sharded or not; or a .gguf file.
        precision : Precision, optional
            Default: the weight format that is stored, KV and activations fp32.
        pack : bool
            As for `random`.

        Raises
        ------
        ConfigError
            If config.json describes a model that this package does not run.
        CheckpointError
            If a file is damaged, or its tensors are not those of the config.
        """
        from npinfer.checkpoint import read_checkpoint

        checkpoint = read_checkpoint(folder)
        precision = checkpoint.precision() if precision is None else precision
        return cls(
            checkpoint.config, precision, checkpoint.source, checkpoint.precision, pack=pack, gain_offset=checkpoint.gain_offset
        )

    def new_cache(self, batch=1, capacity=None):
        """An empty `KVCache` for `batch` sequences of up to `capacity` positions (None: it grows)."""
        return KVCache(self.config, self.precision.kv, batch, capacity, self.numeric, self.weights)

    def prefill(self, tokens, cache, all_logits=False):
        """Run new tokens of every sequence on top of what the cache holds.

        Parameters
        ----------
        tokens : integers (B, T), or (T,) for one sequence
            Only the new ones: positions go on from `cache.length`.  In a
            shape-only run any integers will do.
        cache : KVCache
            Takes the keys and values of the new tokens.
        all_logits : bool
            Whether to run the head at every position.

        Returns
        -------
        float32 array (B, vocab_size) of the last position, or (B, T, vocab_size)
            A shape-only run returns an `Array` without data.

        Raises
        ------
        InputError
            If tokens are no rectangle of integers in the vocabulary.
        CacheError
            If the cache is another model's, of another batch, or too small.
            After a refused call the cache is as it was.
        """
        return self._run("prefill", self.checked(tokens), cache, all_logits)

    def extend(self, tokens, cache):
        """As `prefill`, for what is not the end of a prompt: the head does not run, and nothing is returned."""
        self._run("prefill", self.checked(tokens), cache, all_logits=None)

    def decode(self, tokens, cache):
        """Run one new token of every sequence: (B,) or (B, 1) -> logits (B, vocab_size); else as `prefill`."""
        tokens = as_tokens(tokens)
        tokens = self.checked(tokens.reshape(-1, 1) if tokens.ndim == 1 else tokens)
        if tokens.shape[1] != 1:
            raise InputError(f"decode: tokens are {tokens.shape}, expected one a sequence; prefill takes several")
        return self._run("decode", tokens, cache, all_logits=False)

    @property
    def kv_bytes_per_token(self):
        """Stored bytes of one token's keys and values in all layers."""
        config = self.config
        n_parts, *row = config.kv_shape
        return n_parts * config.n_layers * self.precision.kv.nbytes(tuple(row))

    def fingerprint(self):
        """32 bytes that tell this model from any other: config, formats, mode and weights; worked once."""
        if self._fingerprint is None:
            from hashlib import blake2b

            digest = blake2b(repr((replace(self.config, name=""), self.precision, self.numeric)).encode(), digest_size=32)
            for values in self.weights.values() if self.numeric else ():
                digest.update(np.ascontiguousarray(values))
            self._fingerprint = digest.digest()
        return self._fingerprint

    def checked(self, tokens):
        """Tokens as an integer array (B, T) of ids in the vocabulary, or an `InputError`."""
        tokens = np.atleast_2d(as_tokens(tokens))
        if tokens.ndim != 2 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise InputError(
                f"tokens are {tokens.dtype} of shape {tokens.shape}, expected integers of shape (batch, n_new), at least one"
            )
        if self.numeric and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)][0]
            raise InputError(f"token {wrong} is not in the vocabulary, expected 0 to {self.config.vocab_size - 1}")
        return tokens

    def _run(self, phase, tokens, cache, all_logits):
        mine = self.config, self.precision.kv, self.numeric
        foreign = self.numeric and cache.weights is not None and cache.weights is not self.weights
        if foreign or (cache.config, cache.format, cache.numeric) != mine:
            raise CacheError("the cache was made by another model; make one with this model's new_cache")
        if cache.batch != len(tokens):
            raise CacheError(f"the cache is for a batch of {cache.batch}, tokens are a batch of {len(tokens)}")
        cache.check_even()
        cache.check_room(tokens.shape[1])
        self._check_positions(cache.length + tokens.shape[1])
        n_cached = cache.length
        with forward(phase), np.errstate(over="ignore"):  # exp(-x) of an activation; once, not in every layer
            try:
                logits = self._forward(tokens, cache, all_logits)
            except BaseException:
                cache.rollback(n_cached)
                raise
        if all_logits is None:
            return None
        if all_logits:
            logits = view(logits, (*tokens.shape, self.config.vocab_size))
        return logits.data if self.numeric else logits

    def _check_positions(self, stop):
        if self.config.learned_positions and stop > self.config.max_context:
            raise CacheError(
                f"positions up to {stop} are asked for, and the model has learned {self.config.max_context}; "
                "use a shorter prompt or output"
            )

    def _forward(self, tokens, cache, all_logits):
        """Logits `Array` of the last position of each sequence, of all N = B*T positions, or (None) of none."""
        weights = self.weights
        batch, n_new = tokens.shape
        start = cache.length

        ids = Array(self._token_spec(tokens), tokens if self.numeric else None)
        x = weights.embed(ids, weights.embedding, self._positions(start, n_new))
        rotations = {window: self.rope.rotation(start, n_new, window) for window in self._windows}
        for layers, kind, layer in weights.layers:
            in_layers(layers)
            x = layer(x, Here(batch, n_new, cache, layers, rotations[kind.window]))
        in_layers(None)

        if all_logits is None:
            return None
        if not all_logits:
            x = last_rows(x, batch)
        return weights.head(weights.final_norm(x), weights.lm_head)

    def _token_spec(self, tokens):
        # Token ids are never counted; their format is that of the activations they become.
        return spec(tokens.shape, self.precision.activations, "token")

    def _positions(self, start, n_new):
        """Learned embeddings of the next positions, if the model has them."""
        table = self.weights.positions
        if table is NOTHING:
            return NOTHING
        rows = spec((n_new, self.config.d_model), table.spec.format, "weight", "positions")
        return Array(rows, None if table.data is None else table.data[start : start + n_new])


def as_tokens(tokens):
    """Token ids as an array, or an `InputError` if sequences differ in length."""
    try:
        return np.asarray(tokens)
    except ValueError:
        raise InputError("tokens are ragged: every sequence of a batch needs the same number of them") from None
