"""Arrays as the operations see them: a spec, and data if the run is numeric.

`Spec` is what counting needs: shape, storage format, role.  `Array` pairs a
spec with a NumPy array, or with nothing in a shape-only run.  An `Array`
refuses NumPy's protocols, so arithmetic that bypasses the operations (and
with them the ledger) fails loudly instead of going uncounted.
"""

from functools import lru_cache

ROLES = ("weight", "kv", "activation", "score", "token", "constant")


class Spec:
    """Shape, storage format and role of an array; make one with `spec`.

    Equal specs are one object, so that they hash and compare by identity and
    the memo of a rule costs next to nothing.

    Attributes
    ----------
    shape : tuple of int
    format : Format or None
        None for token ids and tables of constants, which are never counted.
    role : str
        One of `ROLES`; decides which field of `Counts` its bytes go to.
    name : str or None
        For a weight, the operation that uses it: "q_proj", "attn_norm".
    nbytes : int
        Stored bytes, scales included.
    """

    __slots__ = ("shape", "format", "role", "name", "nbytes", "scaled")

    def __repr__(self):
        label = f"{self.role} {self.name}" if self.name else self.role
        return f"<{label} {self.shape} {self.format}>"


@lru_cache(maxsize=2**16)
def spec(shape, format_=None, role="activation", name=None):
    """The one `Spec` of this shape (a tuple of ints), format, role and name."""
    if role not in ROLES:
        raise ValueError(f"role is {role!r}, expected one of {ROLES}")
    self = Spec()
    self.shape, self.format, self.role, self.name = shape, format_, role, name
    self.nbytes = format_.nbytes(shape) if format_ is not None else 0
    self.scaled = format_ is not None and format_.group is not None
    return self


class Joined(tuple):
    """Specs of projections that share their input: (matrix, bias or None) pairs; make one with `joined`.

    One object for equal ones, and hashed by identity, as a `Spec` is.
    """

    __slots__ = ()
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


@lru_cache(maxsize=2**16)
def joined(*pairs):
    """The one `Joined` of these (matrix, bias or None) pairs."""
    return Joined(pairs)


class Array:
    """A spec with data (numeric) or without (shape-only).

    Attributes
    ----------
    spec : Spec
        For a joined weight, the `Joined` specs of the projections in it.
    data : numpy.ndarray, tuple or None
    """

    __slots__ = ("spec", "data")
    __array_ufunc__ = None  # ndarray + Array is a TypeError

    def __init__(self, spec, data=None):
        self.spec, self.data = spec, data

    def __array__(self, *args, **kwargs):
        raise TypeError(
            f"{self!r} is not a NumPy array: compute with npinfer.ops, which count; "
            "numeric runs hand out NumPy arrays, shape-only runs have no values"
        )

    @property
    def shape(self):
        return self.spec.shape

    @property
    def nbytes(self):
        return self.spec.nbytes

    def __repr__(self):
        return f"Array({self.spec!r}{'' if self.data is None else ', numeric'})"


@lru_cache(maxsize=2**16)
def _viewed(spec_, shape, axes):
    if axes is not None:
        shape = tuple([shape[axis] for axis in axes])
    return spec(shape, spec_.format, spec_.role)


def view(x, shape, axes=None):
    """The elements of `x` reshaped to `shape`, then transposed by `axes`; moves and counts nothing."""
    data = x.data
    if data is not None:
        data = data.reshape(shape)
        if axes is not None:
            data = data.transpose(axes)
    return Array(_viewed(x.spec, shape, axes), data)


def columns(x, start, stop):
    """Columns start to stop - 1 of rows (N, d); moves and counts nothing."""
    part = spec((x.shape[0], stop - start), x.spec.format, x.spec.role)
    return Array(part, None if x.data is None else x.data[:, start:stop])


def last_rows(x, batch):
    """The last of each sequence's rows: (batch * T, d) -> (batch, d)."""
    n, d = x.shape
    return Array(spec((batch, d), x.spec.format, x.spec.role), None if x.data is None else x.data[n // batch - 1 :: n // batch])
