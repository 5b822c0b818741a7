"""What all caches share: a use of the block store, from match to report.

All caches are thin policies over `npinfer.blocks.BlockStore`, and a use of any of them is

    match     how much of the prompt is held: at most prompt - 1, since the last
              position's logits are always needed
    acquire   a reference on what matched, so that nothing evicts it
    restore   those rows copied into a private KVCache, recorded as cache_load
    forward   the rest of the prompt computed on top of them
    keep      what is new put into the store, if the budget allows

What a request gets is its own: it decodes on a private copy, and nothing it
does changes what the cache holds.  A lock guards the bookkeeping at both ends
and not the arithmetic between, so that threads may share a cache.

Read `npinfer.blocks` first, then `Cache`; the policies are `npinfer.caches`
and `npinfer.sessions`.
"""

import threading
from collections import deque
from contextvars import Context
from functools import lru_cache, partial

from npinfer import ops
from npinfer.blocks import Block, BlockStore, as_ids, common_prefix, n_bytes, root_key
from npinfer.checks import whole
from npinfer.errors import CacheError, UnknownName
from npinfer.generate import no_tokens
from npinfer.ledger import Ledger, forward
from npinfer.model import Transformer
from npinfer.reports import CachedStart, CacheReport, CacheStats
from npinfer.segments import load_segment

TIERS = ("device", "host")
BLOCK_SIZE = 16  # tokens


class Cache:
    """What the caches share; not made directly.

    Parameters
    ----------
    model : Transformer
    capacity_bytes : int or str, optional
        Budget, such as 8e9, "8 GB" or "8 GiB"; never exceeded.  None is no bound.
    ttl_s : float, optional
        Entries expire so long after the end of their last use.
    clock : callable
        Seconds, monotonic.
    tier : {"device", "host"}
        Where the rows live: from host memory they cross the host link.

    Raises
    ------
    InputError
        If a parameter cannot be meant, such as a capacity below one block.
    """

    def __init__(self, model, capacity_bytes, ttl_s, clock, tier, block_size=BLOCK_SIZE, least_tokens=1):
        if tier not in TIERS:
            raise UnknownName("tier", tier, TIERS)
        self.model, self.tier, self.block_size = model, tier, whole("block_size", block_size)
        self.token_bytes = model.kv_bytes_per_token
        capacity = None if capacity_bytes is None else n_bytes("capacity_bytes", capacity_bytes)
        if capacity is not None and capacity < least_tokens * self.token_bytes:
            raise CacheError(
                f"capacity_bytes is {capacity}, expected room for one block at least: {least_tokens} tokens of "
                f"{self.token_bytes} B are {least_tokens * self.token_bytes}"
            )
        self.store = BlockStore(capacity, ttl_s, clock)
        self._lock = threading.RLock()
        self._ended = deque()  # (use, when) of uses that ended, to be settled under the lock
        self._hit_tokens = self._miss_tokens = self._refused = 0
        twin = Transformer.shape_only(model.config, model.precision)
        self._cold_counts = lru_cache(maxsize=1024)(partial(_cold_counts, twin))

    @property
    def nbytes(self):
        """Stored bytes of the rows held, shared blocks once."""
        with self._lock:
            self._settle()
            return self.store.used

    @property
    def stats(self):
        """`CacheStats` of now."""
        with self._lock:
            self._settle()
            store = self.store
            return CacheStats(
                free=store.free,
                evictable=store.used - store.protected,
                protected=store.protected,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                evicted=store.evicted,
                expired=store.expired,
                refused=self._refused,
            )

    def _settle(self):
        """Under the lock: end the uses that were noted, then drop what is too old."""
        while self._ended:
            self._finish(*self._ended.popleft())
        self._forget(self.store.expire())

    def _finish(self, use, when_s):
        """Under the lock: a use of the blocks `use` ended."""
        self.store.release(use, when_s)

    def _forget(self, dropped):
        """Under the lock: told of the blocks that were dropped."""

    def _ender(self, use):
        """What notes that `use` ended; safe to call from anywhere."""
        ended, clock = self._ended, self.store.clock
        return lambda: ended.append((use, clock()))

    def _root(self, salt):
        """The empty history of this model, apart from those of another salt."""
        return Block(root_key(self.model.fingerprint(), salt))

    def _ids(self, tokens):
        """Ids of one sequence in the model's vocabulary, int64 (n,)."""
        ids = as_ids(tokens)
        self.model.checked(ids)
        scaling = self.model.config.rope_scaling
        if scaling is not None and scaling.by_length and len(ids) > scaling.original_max_context:
            raise CacheError(
                f"the prompt has {len(ids)} tokens, and beyond {scaling.original_max_context} a key depends on how long the "
                "text is (dynamic rope_scaling), so that no other prompt's can be reused; run it without a cache"
            )
        return ids

    def _match(self, root, ids, within_block):
        """The longest chain behind `root` that holds a beginning of `ids`, and how much of them.

        With `within_block` the last block may match in part, or be partly filled.
        """
        chain, n, ids = [], 0, ids.tobytes()
        size = 8 * self.block_size
        while True:
            parent = chain[-1] if chain else root
            rest = ids[8 * n : 8 * n + size]
            block = self.store.child(parent, rest) if len(rest) == size else None
            if block is None:
                break
            chain.append(block)
            n += self.block_size
        if within_block:
            children = list(parent.children.values())
            shared = [common_prefix(block.ids, rest) for block in children]
            if any(shared):
                chain.append(children[shared.index(max(shared))])
                n += max(shared)
        return chain, n

    def _compute(self, ids, chain, n_reused, segments=()):
        """Restore the first `n_reused` rows and the segments, compute the rest: logits, private cache, warm ledger."""
        cache = self.model.new_cache(1)
        cache.keep_rows(n_reused - n_reused % self.block_size)  # to be copied out, whatever the windows
        with Ledger() as warm, forward("prefill"):
            if n_reused:
                ops.cache_load(cache, rows_of(chain, n_reused), n_reused)
            for segment in segments:
                if segment.at > cache.length:
                    self.model.extend(ids[cache.length : segment.at], cache)
                load_segment(self.model, cache, segment)
            logits = self.model.prefill(ids[cache.length :], cache)
        return logits, cache, warm

    def _copied(self, ids, n_full, cache, partly_filled):
        """The rows of `ids` behind `n_full` full blocks, copied out of a private cache: a list of (ids, rows)."""
        text, size = ids.tobytes(), self.block_size
        stop = len(ids) if partly_filled else len(ids) - len(ids) % size
        edges = [(at, min(at + size, stop)) for at in range(n_full * size, stop, size)]
        return [(text[8 * start : 8 * end], cache.rows(start, end)) for start, end in edges]

    def _keep(self, root, use, n_full, pieces, owner=None):
        """Under the lock: put `pieces` into the store, behind the `n_full` full blocks that `use` begins with.

        Blocks that are new, or were held beyond the match, are added to `use`.

        Returns
        -------
        list of Block or None
            Those dropped to make room; None, with nothing dropped or added, if there is none to be made.
        """
        chain, new = use[:n_full], list(pieces)
        n_tokens = n_full * self.block_size + sum([len(ids) // 8 for ids, _ in pieces])
        while new and (held := self.store.child(chain[-1] if chain else root, new[0][0])):
            chain.append(held)
            del new[0]
        already = chain[n_full:]
        self.store.acquire(already)
        use += already
        dropped = None
        if self.store.could_hold(n_tokens * self.token_bytes):
            dropped = self.store.make_room(sum([len(ids) // 8 for ids, _ in new]) * self.token_bytes)
        if dropped is None:
            self._refused += 1
            return None
        self._forget(dropped)
        for ids, rows in new:
            block = self.store.insert(chain[-1] if chain else root, ids, rows, len(ids) // 8 * self.token_bytes, owner)
            if block is None:  # another history has this key, and what hangs on it cannot be kept either
                break
            use.append(block)
            chain.append(block)
        return dropped

    def _report(self, ids, n_reused, warm, n_evicted, approximate=False):
        """Under the lock: count the request, and say what it saved."""
        self._hit_tokens += n_reused
        self._miss_tokens += len(ids) - n_reused
        loaded = warm.total(op="cache_load").kv_bytes_read
        return CacheReport(
            n_asked=len(ids),
            n_reused=n_reused,
            n_computed=len(ids) - n_reused,
            saved=self._cold_counts(len(ids)) - warm.total(),
            bytes_loaded=loaded,
            transfer_bytes=loaded if self.tier == "host" else 0,
            approximate=approximate,
            n_evicted=n_evicted,
            nbytes=self.store.used,
        )

    def _started(self, ids, logits, cache, report, end_use):
        cache.keep_rows(None)
        return CachedStart(logits, cache, report, end_use, partial(_cold_logits, self.model, ids))


def rows_of(chain, n_rows):
    """Payloads of a chain, the last one cut so that all are `n_rows` together."""
    before = sum(map(len, chain[:-1]))
    last = chain[-1].payload
    return [block.payload for block in chain[:-1]] + [last if last is None else last[..., : n_rows - before, :]]


def _cold_counts(twin, n_prompt):
    """Counts of a prefill without a cache; not seen by ledgers that are active."""

    def run():
        with Ledger() as ledger:
            twin.prefill(no_tokens((1, n_prompt)), twin.new_cache(1))
        return ledger.total()

    return Context().run(run)


def _cold_logits(model, ids):
    return Context().run(lambda: model.prefill(ids, model.new_cache(1)))
