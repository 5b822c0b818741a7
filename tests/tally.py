"""An oracle that watches a NumPy body execute: numbers that count their own arithmetic.

`Tally.watch` turns an array of numbers into one of `Element`s.  A body computes
with it as it would with float32, and the tally then knows what was executed:

    tally = Tally()
    out = ops.rms_norm.__wrapped__(tally.watch(gain), tally.watch(x), eps=1e-5)
    tally.flops        # (matmul_flops, elementwise_flops)
    values(out)        # what it computed, in float64

An element knows + - * / max exp sqrt tanh, each 1; negation and selection are
free.  In a matrix product (`@`) each multiplication is 2 and its additions are
nothing.  Whatever else is done with an element (`**`, conversion to float32)
is a TypeError, so that no arithmetic escapes unseen.

Read `Element` (what a number counts), then `Watched` (how an array tells a
matrix product from other arithmetic), then `Tally`.
"""

import math
import operator

import numpy as np

MASKS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def _unary(function):
    return lambda self: self.tally.executed(function, self)


def _binary(function):
    """`function` as a method of its left operand, and as one of its right."""
    return (
        lambda self, other: self.tally.executed(function, self, other),
        lambda self, other: self.tally.executed(function, other, self),
    )


def _comparison(function):
    """A step of max or argmax; a mask compares whole arrays and does not come here."""
    return lambda self, other: self.tally.executed(function, self, other).value


class Element:
    """One number of a watched array."""

    __slots__ = ("value", "tally")

    def __init__(self, value, tally):
        self.value, self.tally = value, tally

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    exp, sqrt, tanh = _unary(math.exp), _unary(math.sqrt), _unary(math.tanh)  # np.exp asks an object for its exp()

    def conjugate(self):  # np.vecdot asks for it
        return self

    def __neg__(self):
        return Element(-self.value, self.tally)

    def __repr__(self):
        return f"Element({self.value})"


def _number(x):
    return x.value if isinstance(x, Element) else x


def values(array):
    """The numbers of a watched array (or of any other), as float64."""
    return np.asarray(np.frompyfunc(_number, 1, 1)(np.asarray(array))).astype(np.float64)


class Watched(np.ndarray):
    """An object array of elements.  Views and slices of it, and results of arithmetic with it, are watched too."""

    def __array_finalize__(self, origin):
        self.tally = getattr(origin, "tally", None)

    def __array_ufunc__(self, ufunc, method, *operands, out=(), **options):
        if ufunc in MASKS:
            return getattr(ufunc, method)(*map(values, operands), **options)
        if out:
            options["out"] = tuple(np.asarray(x) for x in out)
        self.tally.in_product = ufunc is np.matmul
        try:
            result = getattr(ufunc, method)(*map(self.tally.elements, operands), **options)
        finally:
            self.tally.in_product = False
        return out[0] if out else self.tally.watched(result)

    def __array_function__(self, function, types, operands, options):
        if function is np.argsort:  # sorting is selection, as a mask is: free
            return function(*map(values, operands), **options)
        # np.where, np.concatenate and their like: the result is watched as its operands are.
        return self.tally.watched(super().__array_function__(function, types, operands, options))


class Tally:
    """Counts of the arithmetic on the arrays it watches.

    Attributes
    ----------
    matmul_flops : int
        2 for each multiplication inside a matrix product.
    elementwise_flops : int
        1 for each other operation.
    """

    def __init__(self):
        self.matmul_flops = self.elementwise_flops = 0
        self.in_product = False

    @property
    def flops(self):
        return self.matmul_flops, self.elementwise_flops

    def watch(self, numbers):
        """A watched array of these numbers."""
        return self.watched(self.elements(np.asarray(numbers).astype(object)))

    def executed(self, function, *operands):
        """Compute `function`, and count it."""
        if not self.in_product:
            self.elementwise_flops += 1
        elif function is operator.mul:
            self.matmul_flops += 2
        return Element(function(*map(_number, operands)), self)

    def elements(self, x):
        """`x` with a body's own constants among model data (the -inf of a mask) made elements like the rest."""
        if getattr(x, "dtype", None) != object:
            return x
        return np.asarray(np.frompyfunc(self._element, 1, 1)(np.asarray(x)))

    def _element(self, number):
        return number if isinstance(number, Element) else Element(float(number), self)

    def watched(self, result):
        """`result` as a watched array, if it is an array of elements."""
        if isinstance(result, np.ndarray) and result.dtype == object:
            result = result.view(Watched)
            result.tally = self
        return result
