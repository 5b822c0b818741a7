"""Counting: what an operation costs, and the ledgers that write it down.

Read `Counts` (the ten numbers), then `Ledger`.  Operations find the active
ledgers through a context variable: nothing is handed through the model's
code, and threads do not see each other's ledgers.

    with npinfer.Ledger() as ledger:
        model.prefill(tokens, cache)
    ledger.total(op="q_proj").matmul_flops
"""

from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, count
from typing import NamedTuple

from npinfer.errors import InputError


class Counts(NamedTuple):
    """FLOPs and bytes; integers, or integer arrays from the closed forms.

    `matmul_flops` counts the whole rectangle of (query, key) pairs that NumPy
    multiplies; `masked_flops` is the part of it that the causal mask or the
    window throws away.
    """

    matmul_flops: int = 0
    masked_flops: int = 0
    elementwise_flops: int = 0
    weight_bytes_read: int = 0
    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    activation_bytes_read: int = 0
    activation_bytes_written: int = 0
    score_bytes_read: int = 0
    score_bytes_written: int = 0

    def __add__(self, other):
        return Counts(*[mine + theirs for mine, theirs in zip(self, other, strict=True)])

    def __sub__(self, other):
        return Counts(*[mine - theirs for mine, theirs in zip(self, other, strict=True)])

    def __mul__(self, times):
        return Counts(*[mine * times for mine in self])

    __rmul__ = __mul__  # or a tuple would repeat itself

    @property
    def needed_flops(self):
        """Matrix FLOPs of the pairs that are kept: what a kernel that skips the mask performs."""
        return self.matmul_flops - self.masked_flops

    @property
    def kv_bytes(self):
        """KV bytes moved: read and written."""
        return self.kv_bytes_read + self.kv_bytes_written

    @property
    def activation_bytes(self):
        """Activation bytes moved: read and written."""
        return self.activation_bytes_read + self.activation_bytes_written


def cost(reads=(), writes=(), **flops):
    """`Counts` of one operation: its FLOPs, and the bytes of what it reads and writes.

    Parameters
    ----------
    reads, writes : iterables of Spec
        Their stored bytes go to the field of their role.
    **flops
        `matmul_flops`, `masked_flops`, `elementwise_flops`.
    """
    fields = flops
    for specs, direction in ((reads, "read"), (writes, "written")):
        for spec in specs:
            if spec.role not in ("token", "constant"):
                field = f"{spec.role}_bytes_{direction}"
                fields[field] = fields.get(field, 0) + spec.nbytes
    return Counts(**fields)


class Scope(NamedTuple):
    """Where an entry was made: phase, number of the forward, layers it stands for."""

    phase: str | None = None
    forward: int | None = None
    layers: range | None = None


class Entry(NamedTuple):
    """One line of a ledger; `counts` is of one layer, `layers` says for which."""

    phase: str | None
    forward: int
    op: str
    layers: range | None
    counts: Counts

    @property
    def calls(self):
        """How many times the operation ran: once for each layer, or once outside them."""
        return 1 if self.layers is None else len(self.layers)


class _Place:
    """Where entries go: to a new page of each active ledger, which `writers` append to.

    Another scope, or other ledgers, are another place, also on the way back: pages are in the order things ran.
    """

    __slots__ = ("ledgers", "scope", "writers")

    def __init__(self, ledgers=(), scope=Scope()):
        self.ledgers, self.scope, self.writers = ledgers, scope, []
        for ledger in ledgers:
            page = []
            ledger._pages.append((scope, page))
            self.writers.append(page.append)


_place = ContextVar("npinfer_place", default=_Place())
current = _place.get
_forwards = count()


class Ledger:
    """A record of what ran while it was active; a context manager, may be nested.

    Every active ledger gets every entry.  Entering one again goes on where it
    stopped.
    """

    def __init__(self):
        self._pages = []  # (scope, ((op, Counts), ...) of each operation) in the order things ran
        self._outer = []  # tokens that restore what was active before
        self._grouped = {}  # results of `by`, with the number of lines they were made from

    def __enter__(self):
        place = current()
        active = place.ledgers
        self._outer.append(_place.set(_Place(active if self in active else (*active, self), place.scope)))
        return self

    def __exit__(self, *exc_info):
        scope = current().scope  # a layer may have begun meanwhile
        _place.reset(self._outer.pop())
        _place.set(_Place(current().ledgers, scope))

    def entries(self, forward=None):
        """Yield an `Entry` for each operation, in the order they ran; of all forwards, or of one by its number."""
        numbers = {id: number for number, id in enumerate(self._forwards())}
        for scope, page in self._pages:
            number = numbers.get(scope.forward)
            if page and (forward is None or number == forward):
                for op, counts in chain.from_iterable(page):
                    yield Entry(scope.phase, number, op, scope.layers, counts)

    def _forwards(self):
        """Phase of each forward by its id, in the order they ran."""
        return {scope.forward: scope.phase for scope, page in self._pages if page}

    @property
    def forwards(self):
        """Phase of each forward that the entries come from, in the order they ran."""
        return list(self._forwards().values())

    def by(self, *keys):
        """Totals grouped by fields of `Entry`.

        Parameters
        ----------
        *keys : str
            "phase", "op", "forward"; layers are summed.

        Returns
        -------
        dict
            (value of each key) -> (calls, Counts), in order of first appearance.
        """
        at, n_lines = self._grouped.get(keys), sum([len(page) for _, page in self._pages])
        if at is None or at[0] != n_lines:
            at = self._grouped[keys] = n_lines, self._group(keys)
        return dict(at[1])

    def total(self, phase=None, op=None, layer=None, forward=None):
        """Sum of the entries that match, as `Counts`.

        Parameters
        ----------
        phase : {"prefill", "decode"}, optional
        op : str, optional
        layer : int, optional
            Entries of this layer only.
        forward : int, optional
            Entries of this forward only, the first is 0.
        """
        if phase not in (None, "prefill", "decode"):
            raise InputError(f"phase is {phase!r}, expected 'prefill' or 'decode'")
        wanted = phase, op
        if layer is None and forward is None:
            return sum([counts for key, (_, counts) in self.by("phase", "op").items() if _match(key, wanted)], Counts())
        total = Counts()
        for entry in self.entries(forward):
            if _match((entry.phase, entry.op), wanted):
                if layer is None:
                    total += entry.counts * entry.calls
                elif entry.layers is not None and layer in entry.layers:
                    total += entry.counts
        return total

    def _group(self, keys):
        """`by`, worked on lines that repeat: a memoised rule gives one object for equal costs."""
        lines, numbers = {}, {}
        for (phase, forward, layers), page in self._pages:
            if not page:
                continue
            number = numbers.setdefault(forward, len(numbers)) if "forward" in keys else None
            calls = 1 if layers is None else len(layers)
            for costs in page:
                line = phase, number, id(costs)
                if line in lines:
                    lines[line][0] += calls
                else:
                    lines[line] = [calls, phase, number, costs]
        groups = {}
        for calls, phase, number, costs in lines.values():
            for op, counts in costs:
                values = {"phase": phase, "forward": number, "op": op}
                key = tuple([values[name] for name in keys])
                before, total = groups.get(key, (0, Counts()))
                groups[key] = before + calls, total + counts * calls
        return groups


def _match(values, wanted):
    return all(want is None or value == want for value, want in zip(values, wanted))


def record(costs):
    """Write ((op, Counts), ...) to every active ledger."""
    for write in current().writers:
        write(costs)


@contextmanager
def forward(phase):
    """Entries made inside belong to one forward of `phase`.

    Inside a forward of the same phase this changes nothing, so that a caller
    can draw what follows a forward (the sampling) into it.
    """
    outer = current()
    if outer.scope.phase == phase:
        yield
        return
    token = _place.set(_Place(outer.ledgers, Scope(phase, next(_forwards))))
    try:
        yield
    finally:
        _place.reset(token)
        _place.set(_Place(outer.ledgers, outer.scope))


def in_layers(layers):
    """Entries made from here to the end of the forward stand for each of `layers` (None: for no layer)."""
    place = current()
    _place.set(_Place(place.ledgers, Scope(place.scope.phase, place.scope.forward, layers)))
