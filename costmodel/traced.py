"""Numbers that remember how they were made, so that a formula prints itself.

A `Traced` number goes through the functions of this package in place of an int
or a float and comes out with its value and its expression: a sum of products
of named quantities, like terms merged.  What is printed is made from nothing
else, so that it says what the code computes.

Read `Factor`, `_addends` (how a sum is written), then `Traced`.
"""

import operator
from collections import Counter
from itertools import count
from math import gcd
from typing import NamedTuple

import numpy as np

from costmodel.arguments import Symbol

NAMES, VALUES = 1, 2  # the fields of Factor that the two texts are made of
_MADE, _BYTES = 10**9, 10**9 + 1  # ranks: what is computed stands behind names, and bytes last
_ranks = count()


class Factor(NamedTuple):
    """What terms are products of: its place among the others, and its text by name and filled in."""

    rank: int
    name: str
    value: str


def digits(value):
    """A number as it is filled in: whole ones in full, 131,072, others to six digits, 165.2e12."""
    if isinstance(value, int):
        return f"{value:,}"
    from decimal import Decimal

    return Decimal(f"{value:.6g}").normalize().to_eng_string().lower().replace("e+", "e")


def _addends(terms, form):
    """Texts of (sign, product) whose sum the terms are, with what several have in common pulled out."""
    if not terms:
        return [(1, "0")]
    shared = gcd(*terms.values()) * (-1 if max(terms.values()) < 0 else 1)
    common = Counter(next(iter(terms)))
    for factors in terms:
        common &= Counter(factors)
    if len(terms) == 1 or abs(shared) > 1 or common:
        rest = {tuple((Counter(factors) - common).elements()): c // shared for factors, c in terms.items()}
        group = [] if len(terms) == 1 else [Factor(_MADE, *[f"({_sum(rest, form)})"] * 2)]
        return [(1 if shared > 0 else -1, _product(abs(shared), [*common.elements(), *group], form))]
    uses = Counter([factor for factors in terms for factor in set(factors)])
    gathers = min(uses, key=lambda factor: (-uses[factor], factor))
    if uses[gathers] == 1:
        return [addend for term in terms.items() for addend in _addends(dict([term]), form)]
    inside = {factors: c for factors, c in terms.items() if gathers in factors}
    outside = {factors: c for factors, c in terms.items() if gathers not in factors}
    return _addends(inside, form) + (_addends(outside, form) if outside else [])


def _product(number, factors, form):
    texts = [factor[form] for factor in sorted(factors)]
    return " x ".join(texts if number == 1 and texts else [f"{number:,}", *texts])


def _sum(terms, form):
    (sign, text), *others = sorted(_addends(terms, form), key=lambda addend: -addend[0])  # minus signs last
    text = f"-{text}" if sign < 0 else text
    return text + "".join([f" {'-' if sign < 0 else '+'} {product}" for sign, product in others])


def _without(factor, factors):
    at = factors.index(factor)
    return factors[:at] + factors[at + 1 :]


class Traced(Symbol):
    """A number and the expression that gave it.

    Attributes
    ----------
    value : int or float
        Computed beside the expression, by the same operations in the same order.
    terms : dict
        Sorted tuple of `Factor` -> its whole coefficient; the number is their sum.
    """

    __hash__ = object.__hash__

    def __init__(self, value, terms):
        self.value, self.terms = value, terms

    @classmethod
    def named(cls, name, value):
        """A quantity of its own; products list names in the order in which they were made."""
        return cls._one(value, next(_ranks), name, digits(value))

    @classmethod
    def _one(cls, value, *factor, coefficient=1):
        return cls(value, {(Factor(*factor),): coefficient})

    @classmethod
    def of(cls, number):
        """A number as one that is traced; a plain one is its own text."""
        if isinstance(number, Traced):
            return number
        if isinstance(number, int) or not number:
            return cls(number, {(): number} if number else {})
        return cls._one(number, _MADE, digits(number), digits(number))

    def text(self, form=NAMES):
        """The expression, by name or with the values filled in."""
        return _sum(self.terms, form)

    def _enclosed(self, form, alone=False):
        """The text in parentheses if it is a sum; for `alone`, if it is anything but one name or number."""
        text = self.text(form)
        bare = " x " not in text and " / " not in text if alone else True
        return text if bare and len(_addends(self.terms, form)) == 1 else f"({text})"

    def __index__(self):
        return operator.index(self.value)

    def __add__(self, other):
        other, terms = self.of(other), dict(self.terms)
        for factors, coefficient in other.terms.items():
            terms[factors] = terms.get(factors, 0) + coefficient
        return Traced(self.value + other.value, {factors: c for factors, c in terms.items() if c})

    __radd__ = __add__

    def __neg__(self):
        return Traced(-self.value, {factors: -c for factors, c in self.terms.items()})

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def __mul__(self, other):
        other, terms = self.of(other), {}
        for mine, a in self.terms.items():
            for theirs, b in other.terms.items():
                factors = tuple(sorted(mine + theirs))
                terms[factors] = terms.get(factors, 0) + a * b
        return Traced(self.value * other.value, terms)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._quotient(self.value / self.of(other).value, other)

    def __rtruediv__(self, other):
        return self.of(other) / self

    def _quotient(self, value, other, rounding=""):
        other = self.of(other)
        texts = [f"{self._enclosed(form)} / {other._enclosed(form, alone=True)}" for form in (NAMES, VALUES)]
        return self._one(value, _MADE, *[f"{rounding}({text})" if rounding else text for text in texts])

    def __pow__(self, other):
        texts = [f"{self._enclosed(form, alone=True)} ** {other._enclosed(form, alone=True)}" for form in (NAMES, VALUES)]
        return self._one(self.value**other.value, _MADE, *texts)

    def __round__(self):
        return self._one(round(self.value), _MADE, *[f"round({self.text(form)})" for form in (NAMES, VALUES)])

    def __floordiv__(self, divisor):
        if isinstance(divisor, Traced):  # one name, which every term has
            ((shared,),) = divisor.terms
            return Traced(self.value // divisor.value, {_without(shared, factors): c for factors, c in self.terms.items()})
        value, rest = divmod(self.value, divisor)
        if divisor == 8 and not rest and self.terms:  # bits to bytes
            bits = gcd(*self.terms.values())
            width = Factor(_BYTES, f"{bits / 8:g} B", f"{bits / 8:g}")
            return Traced(value, {(*factors, width): c // bits for factors, c in self.terms.items()})
        shared = gcd(divisor, *self.terms.values())
        reduced = Traced(self.value // shared, {factors: c // shared for factors, c in self.terms.items()})
        divisor //= shared
        if divisor == 1:
            return reduced
        if max(reduced.terms.values()) < 0:
            return -(-reduced)._quotient(-value, divisor, "ceil" if rest else "")
        return reduced._quotient(value, divisor, "floor" if rest else "")

    def __array_ufunc__(self, ufunc, method, a, b):
        """The smaller or the larger of two numbers, which NumPy is asked for."""
        name = {np.minimum: "min", np.maximum: "max"}[ufunc]
        a, b = self.of(a), self.of(b)
        value = {"min": min, "max": max}[name](a.value, b.value)
        for zero, other in ((a, b), (b, a)):
            if not zero.terms and other.value >= 0 and name == "min":
                return zero
            if not zero.terms and name == "max" and min(other.terms.values(), default=0) >= 0:
                return other  # a sum of products of what is never negative
        return self._one(value, _MADE, *[f"{name}({a.text(form)}, {b.text(form)})" for form in (NAMES, VALUES)])

    def __lt__(self, other):
        return self.value < self.of(other).value

    def __le__(self, other):
        return self.value <= self.of(other).value

    def __gt__(self, other):
        return self.value > self.of(other).value

    def __ge__(self, other):
        return self.value >= self.of(other).value
