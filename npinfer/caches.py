"""Two caches that any request may use: for fixed prefixes, and for prompts in general.

Both are policies over `npinfer.reuse.Cache`: what to look for, and what to keep.
"""

import time

from npinfer.checks import whole
from npinfer.errors import CacheError
from npinfer.reuse import Cache
from npinfer.segments import SegmentIndex, check_movable


class PrefixCache(Cache):
    """Fixed beginnings of prompts, such as system prompts, computed once by `add`.

    Parameters
    ----------
    model, capacity_bytes, tier
        See `Cache`.
    """

    def __init__(self, model, capacity_bytes=None, tier="device"):
        super().__init__(model, capacity_bytes, None, time.monotonic, tier)
        self._history = self._root(b"")

    def add(self, tokens):
        """Compute and keep the KV of `tokens`; returns the bytes of the entry.

        Blocks that it shares with other entries are neither computed nor held
        twice, and a partly filled block that it continues is replaced.

        Raises
        ------
        CacheError
            If it is longer than the model's context, or does not fit the
            budget beside what is in use; nothing is dropped for it.
        """
        ids = self._ids(tokens)
        nbytes = len(ids) * self.token_bytes
        limit = self.model.config.max_context
        if limit is not None and len(ids) > limit:
            raise CacheError(f"the prefix has {len(ids)} tokens, expected at most the model's context of {limit}")
        with self._lock:
            self._settle()
            if not self.store.could_hold(nbytes):
                self._refused += 1
                raise CacheError(
                    f"the prefix needs {nbytes} bytes, more than the budget of {self.store.capacity}; make capacity_bytes larger"
                )
            use, n_matched = self._match(self._history, ids, within_block=True)
            n_full = n_matched // self.block_size
            if n_matched < len(ids):
                del use[n_full:]  # a block that matches in part is computed again, and may make room for its successor
            self.store.acquire(use)
        end_use = self._ender(use)
        try:
            if n_matched < len(ids):
                _, cache, _ = self._compute(ids, use, n_full * self.block_size)
                pieces = self._copied(ids, n_full, cache, partly_filled=True)
                with self._lock:
                    self._settle()  # what was given back meanwhile is room
                    if self._keep(self._history, use, n_full, pieces) is None:
                        raise CacheError(
                            f"the prefix needs {nbytes} bytes and does not fit the budget of {self.store.capacity} "
                            f"beside the {self.store.protected} in use; make capacity_bytes larger"
                        )
                    self._drop_continued(use[n_full:])
        finally:
            end_use()
        return nbytes

    def _drop_continued(self, added):
        """Under the lock: drop idle blocks that say no more than the beginning of the first of those added."""
        for block in added[:1]:  # none if its key collided
            for other in list(block.parent.children.values()):
                if other is not block and not other.refs and block.ids.startswith(other.ids):
                    self.store.drop([other])

    def prefill(self, tokens):
        """Start from the longest common prefix with any entry; `CachedStart`."""
        ids = self._ids(tokens)
        with self._lock:
            self._settle()
            use, n_reused = self._match(self._history, ids[:-1], within_block=True)
            self.store.acquire(use)
        try:
            logits, cache, warm = self._compute(ids, use, n_reused)
            with self._lock:
                report = self._report(ids, n_reused, warm, n_evicted=0)
        except BaseException:
            self._ender(use)()
            raise
        return self._started(ids, logits, cache, report, self._ender(use))


class PromptCache(Cache):
    """Prompts in general, in blocks that match behind the same history only.

    Parameters
    ----------
    block_size : int
        Tokens of a block; only full ones are kept.
    salt : bytes
        Keeps apart what must not be shared, such as tenants.
    segments : bool
        Whether blocks are reused behind other histories and at other positions
        too, their keys rotated on: exact for one layer, an approximation above.
    recompute_tokens : int
        How many tokens at the beginning of such a segment are computed afresh.
    model, capacity_bytes, ttl_s, clock, tier
        See `Cache`.
    """

    def __init__(
        self, model, block_size=16, capacity_bytes=None, ttl_s=None, clock=time.monotonic, salt=b"", segments=False,
        recompute_tokens=0, tier="device",
    ):  # fmt: skip
        super().__init__(model, capacity_bytes, ttl_s, clock, tier, block_size, least_tokens=block_size)
        self._history = self._root(salt)
        self._recompute_tokens = whole("recompute_tokens", recompute_tokens, least=0)
        if segments:
            check_movable(model.config)
        self._segments = SegmentIndex(model, self.block_size) if segments else None

    def prefill(self, tokens):
        """Start from the longest chain of blocks that the prompt begins with, and keep its full blocks; `CachedStart`."""
        ids = self._ids(tokens)
        with self._lock:
            self._settle()
            chain, n_matched = self._match(self._history, ids[:-1], within_block=False)
            found = self._segments.find(self.store, ids, n_matched, self._recompute_tokens) if self._segments else []
            use = chain + [block for segment in found for block in segment.lineage]
            self.store.acquire(use)
        try:
            logits, cache, warm = self._compute(ids, chain, n_matched, found)
            approximate = any([segment.is_approximate(self.model) for segment in found])
            exact = ids[: found[0].at] if approximate else ids  # what follows must not be taken for this history's rows
            pieces = self._copied(exact, len(chain), cache, partly_filled=False)
            with self._lock:
                self._settle()  # what was given back meanwhile is room
                dropped = self._keep(self._history, use, len(chain), pieces)
                if self._segments:
                    self._segments.add(use)
                n_reused = n_matched + sum([segment.n for segment in found])
                report = self._report(ids, n_reused, warm, len(dropped or ()), approximate)
        except BaseException:
            self._ender(use)()
            raise
        return self._started(ids, logits, cache, report, self._ender(use))

    def _forget(self, dropped):
        if self._segments:
            self._segments.forget(dropped)
