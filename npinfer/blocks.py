"""The one store beneath all three caches: read-only blocks of KV under a byte budget.

A `Block` is the KV of some neighbouring tokens behind one particular history.
Its key is a hash of its parent's key and of its own token ids, so that equal
keys mean equal histories; the ids are kept and compared all the same, and a
collision is a miss.  What a block carries is no concern of the store: arrays
in a numeric cache, nothing where only bytes are counted.

Chains.  A use takes a reference on every block from the root to its last one.
Blocks without references wait in a queue in the order in which they were given
back, tail of the chain first.  So the head of the queue is always the least
recently used block that no other block hangs on, and it is also the first to
expire: making room and expiring are both dropping the head, and the parent of
every block that is there is there too.

The store does not lock; its caches do.
"""

from collections import OrderedDict
from hashlib import blake2b
from types import MappingProxyType

import numpy as np

from npinfer.errors import InputError

UNITS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def n_bytes(name, value):
    """A number of bytes from a number, or from text with a unit: 8e9, "8 GB" (1e9 each), "8 GiB" (2**30 each).

    A fraction of a byte is dropped.

    Raises
    ------
    InputError
        If it is no number from 0 up, or its unit is unknown.
    """
    text = str(value).strip()
    digits = text.rstrip("BkKMGTi ")
    unit = text[len(digits) :].strip()
    if unit not in UNITS:
        raise InputError(f"{name} is {value!r}: unknown unit {unit!r}, expected one of {', '.join(filter(None, UNITS))}")
    try:
        amount = int(digits) * UNITS[unit]
    except ValueError:
        try:
            amount = float(digits) * UNITS[unit]
        except ValueError:
            amount = -1
    if isinstance(value, bool) or not 0 <= amount < 2**63:
        raise InputError(f"{name} is {value!r}, expected a number of bytes such as 8000000000, '8 GB' or '8 GiB'")
    return int(amount)


def as_ids(tokens):
    """Token ids at fixed width, an int64 array (n,), from a flat list or a batch of one."""
    try:
        ids = np.asarray(tokens)
    except ValueError:
        ids = np.empty(0)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu" or ids.max() >= 2**63:
        raise InputError(
            f"tokens are {ids.dtype} of shape {ids.shape}, expected one sequence of integers, at least one"
        )
    return ids.astype("<i8")


def root_key(fingerprint, salt):
    """Key of the empty history of a model; `salt` (bytes) keeps apart what must not be shared."""
    if not isinstance(salt, bytes):
        raise InputError(f"salt is {salt!r}, expected bytes such as {str(salt).encode()!r}")
    return blake2b(len(salt).to_bytes(8, "little") + salt + fingerprint, digest_size=32).digest()


def common_prefix(ids, others):
    """How many ids two byte strings of them share at their beginnings."""
    n = min(len(ids), len(others)) // 8
    if ids[: 8 * n] == others[: 8 * n]:
        return n
    return int((np.frombuffer(ids, "<i8", n) != np.frombuffer(others, "<i8", n)).argmax())


def block_key(parent_key, ids):
    """Key of the block of `ids` (bytes, 8 each) behind the history of `parent_key`."""
    return blake2b(parent_key + ids, digest_size=32).digest()


NO_CHILDREN = MappingProxyType({})  # most blocks of a long store have none, and an empty dict each would be felt


class Block:
    """KV of some tokens behind one history; read-only.

    Attributes
    ----------
    key : bytes
    parent : Block or None
        None for a root, the empty history, which holds nothing and is not in the store.
    ids : bytes
        Its token ids, 8 bytes each.
    payload : object
        What the cache keeps for it.
    nbytes : int
    refs : int
        Uses that have not ended.
    children : mapping of key to Block
    released_s : float
        When its last use ended.
    owner : object
        Whose blocks are dropped together; None: each by itself.
    """

    __slots__ = ("key", "parent", "ids", "payload", "nbytes", "refs", "children", "released_s", "owner")

    def __init__(self, key, parent=None, ids=b"", payload=None, nbytes=0, owner=None):
        self.key, self.parent, self.ids, self.payload, self.nbytes = key, parent, ids, payload, nbytes
        self.owner, self.refs, self.children, self.released_s = owner, 0, NO_CHILDREN, None

    def __len__(self):
        return len(self.ids) // 8


class BlockStore:
    """Blocks by key, within a budget.

    Parameters
    ----------
    capacity_bytes : int or None
        Never exceeded; None is no bound.
    ttl_s : float or None
        Blocks expire this long after their last use ended; None is never.
    clock : callable
        Seconds, monotonic.

    Attributes
    ----------
    used, protected : int
        Bytes held, and bytes of them in use.
    evicted, expired : int
        Blocks dropped so far to make room, and for their age.
    """

    def __init__(self, capacity_bytes, ttl_s, clock):
        if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0):
            raise InputError(f"ttl_s is {ttl_s}, expected seconds above 0, or None to keep entries")
        self.capacity, self.ttl_s, self.clock = capacity_bytes, ttl_s, clock
        self.used = self.protected = self.evicted = self.expired = 0
        self._blocks = {}
        self._idle = OrderedDict()  # blocks without references by key, next to go first

    def __len__(self):
        return len(self._blocks)

    def __iter__(self):
        return iter(self._blocks.values())

    @property
    def free(self):
        """Bytes not used, or None without a bound."""
        return None if self.capacity is None else self.capacity - self.used

    def __contains__(self, block):
        return self._blocks.get(block.key) is block

    def child(self, parent, ids):
        """The block of `ids` (bytes) behind `parent`, or None; a block of the same key and other ids is a miss."""
        block = self._blocks.get(block_key(parent.key, ids))
        return block if block is not None and block.parent is parent and block.ids == ids else None

    def acquire(self, chain):
        """Begin a use of the blocks of a chain, root first."""
        for block in chain:
            if block.refs == 0:
                self._idle.pop(block.key, None)
                self.protected += block.nbytes
            block.refs += 1

    def release(self, chain, now_s):
        """End a use of the blocks of a chain.  Tail first, so that a parent is never dropped before its child."""
        for block in reversed(chain):
            block.refs -= 1
            if block.refs == 0:
                block.released_s = now_s
                self._idle[block.key] = block
                self.protected -= block.nbytes

    def expire(self):
        """Drop what has been idle for `ttl_s` or longer; returns the blocks dropped."""
        dropped = []
        if self.ttl_s is not None:
            dead_s = self.clock() - self.ttl_s
            while self._idle and self._head().released_s <= dead_s:
                dropped.append(self._remove(self._head()))
        self.expired += len(dropped)
        return dropped

    def make_room(self, nbytes):
        """Drop idle blocks, least recently used first, until `nbytes` are free.

        Returns
        -------
        list of Block or None
            Those dropped; None, with nothing dropped, if what is in use
            leaves no such room.
        """
        if not self.has_room(nbytes):
            return None
        dropped = []
        while self.capacity is not None and self.used + nbytes > self.capacity:
            dropped.append(self._remove(self._head()))
            owner = dropped[-1].owner
            while owner is not None and self._idle and self._head().owner == owner:
                dropped.append(self._remove(self._head()))
        self.evicted += len(dropped)
        return dropped

    def could_hold(self, nbytes):
        """Whether `nbytes` fit the budget if nothing else is there."""
        return self.capacity is None or nbytes <= self.capacity

    def has_room(self, nbytes, without=()):
        """Whether `nbytes` fit beside what is in use, the blocks `without` given up by their one user."""
        given_up = sum([block.nbytes for block in without if block.refs == 1])
        return self.capacity is None or self.protected - given_up + nbytes <= self.capacity

    def insert(self, parent, ids, payload, nbytes, owner=None):
        """Add a block, in use by the caller; the room must have been made.

        Returns
        -------
        Block or None
            None if another block has the key (a collision): this one cannot be kept.
        """
        key = block_key(parent.key, ids)
        if key in self._blocks:
            return None
        assert self.capacity is None or self.used + nbytes <= self.capacity
        block = self._blocks[key] = Block(key, parent, ids, payload, nbytes, owner)
        if not parent.children:
            parent.children = {}
        parent.children[key] = block
        self.used += nbytes
        self.acquire([block])
        return block

    def drop(self, chain):
        """Remove the idle blocks at the end of a chain, up to the first that is in use or that another hangs on."""
        for block in reversed(chain):
            if block.refs or block.children:
                return
            self._remove(block)

    def lineage(self, block):
        """The chain that ends in `block`, first block first."""
        chain = []
        while block.parent is not None:
            chain.append(block)
            block = block.parent
        return chain[::-1]

    def _head(self):
        return next(iter(self._idle.values()))

    def _remove(self, block):
        del self._idle[block.key]
        del self._blocks[block.key]
        del block.parent.children[block.key]
        self.used -= block.nbytes
        return block
