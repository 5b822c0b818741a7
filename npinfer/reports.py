"""What a use of a cache gives back: a start to decode from, and what it saved."""

from dataclasses import dataclass
from weakref import finalize

import numpy as np

from npinfer.errors import InputError
from npinfer.ledger import Counts


@dataclass(frozen=True)
class CacheReport:
    """What one use of a cache saved.

    Attributes
    ----------
    n_asked, n_reused, n_computed : int
        Prompt tokens: all, served from the cache, computed now.
    saved : Counts
        Cold ledger minus warm ledger.  Loading is KV traffic of the warm one,
        so that fields may be negative.  The cold run is counted and not
        computed: of experts it reads the expected number, the warm run those
        that its tokens chose.
    bytes_loaded : int
        Stored bytes of the rows restored, each once.
    transfer_bytes : int
        Bytes over the host link: those, if the cache lives in host memory.
    approximate : bool
        Whether rows were reused that this history would have made otherwise.
    n_evicted : int
        Blocks dropped to make room for what is new.
    nbytes : int
        What the cache holds afterwards.
    """

    n_asked: int
    n_reused: int
    n_computed: int
    saved: Counts
    bytes_loaded: int
    transfer_bytes: int
    approximate: bool
    n_evicted: int
    nbytes: int

    @property
    def flops_saved(self):
        """Matrix FLOPs that the cold run performs and this one did not."""
        return self.saved.matmul_flops


@dataclass(frozen=True)
class CacheStats:
    """Totals of a cache; bytes are of now, the rest since it was made.

    Attributes
    ----------
    free, evictable, protected : int
        Bytes unused (None without a budget), held but idle, and in use.
    hit_tokens, miss_tokens : int
        Prompt tokens served from the cache, and computed.
    evicted, expired : int
        Blocks dropped to make room, and for their age.
    refused : int
        Entries that did not fit.
    """

    free: int | None
    evictable: int
    protected: int
    hit_tokens: int
    miss_tokens: int
    evicted: int
    expired: int
    refused: int


class CachedStart:
    """A prompt that has been prefilled, by reuse as far as possible; a context manager.

    Leaving it, `release` or garbage collection ends the use of what it shares
    with the cache; `logits` and `cache` stay valid after that.

    Attributes
    ----------
    logits : float32 array (1, vocab_size)
        Of the last position; an `Array` without data in a shape-only run.
    cache : KVCache
        Private, holds the whole prompt; decode on it.
    report : CacheReport
    """

    def __init__(self, logits, cache, report, end_use, cold_logits):
        self.logits, self.cache, self.report, self._cold_logits = logits, cache, report, cold_logits
        # Garbage collection may strike anywhere, also inside the cache's lock: `end_use` only takes a note.
        self._end = finalize(self, end_use)
        self._end.atexit = False

    def release(self):
        """End the use; doing it again changes nothing."""
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.release()

    def deviation(self):
        """Largest difference of `logits` from those of a full run without a cache; runs it, unrecorded.

        Raises
        ------
        InputError
            In a shape-only run, which has no logits.
        """
        if not isinstance(self.logits, np.ndarray):
            raise InputError("deviation compares logits, and a shape-only run has none; use a numeric model")
        return float(np.abs(self.logits - self._cold_logits()).max())
