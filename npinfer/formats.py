"""Storage formats: how many bits an element takes, and what rounding to it does.

NumPy computes in float32 here whatever the format.  A format decides two
things: how many bytes an array counts as (`Format.nbytes`), and which values
it can hold (`rounded`, `quantised`).

fp16 is IEEE 754 binary16, bf16 the upper half of binary32; which operand has
which scales is said in the README, "What is counted".
"""

from dataclasses import dataclass

import numpy as np

from npinfer.errors import ConfigError, InputError, UnknownName

SCALE_BYTES = 2  # every scale is one fp16 number


class Format(str):
    """A storage format: its name, as a `str`, with what one needs to count its bytes.

    Attributes
    ----------
    bits : int or float
        Bits per element, scales not included.
    group : int or None
        Elements along the last axis that share one fp16 scale; 0 is a whole
        row, None is no scales at all.
    """

    def __new__(cls, name, bits, group=None, ratio=None):
        self = super().__new__(cls, name)
        self.bits, self.group = bits, group
        self._ratio = ratio or (bits, 1)  # the exact bits as numerator, denominator
        return self

    def __reduce__(self):
        return Format, (str(self), self.bits, self.group, self._ratio)

    def scales(self, shape):
        """Number of scales that an array of `shape` is stored with."""
        if self.group is None or not shape:
            return 0
        *rows, row = shape
        n = -(-row // self.group) if self.group else 1
        for rows_along_axis in rows:
            n *= rows_along_axis
        return n

    def nbytes(self, shape):
        """Stored bytes of an array of `shape`, rounded up to whole bytes, scales included."""
        n = 1
        for axis in shape:
            n *= axis
        bits, per = self._ratio
        return -(-n * bits // (8 * per)) + SCALE_BYTES * self.scales(shape)


FORMATS = {
    format_: format_
    for format_ in (
        Format("fp32", 32),
        Format("fp16", 16),
        Format("bf16", 16),
        Format("fp8", 8),
        Format("int8", 8, group=0),
        Format("int4", 4, group=128),
        # Blocks of GGUF files: bits per weight with the scales inside, which therefore are not counted apart.
        Format("q8_0", 8.5, ratio=(17, 2)),  # 32 weights in 34 bytes
        Format("q4_0", 4.5, ratio=(9, 2)),  # 32 in 18
        Format("q4_1", 5.0, ratio=(5, 1)),  # 32 in 20
        Format("q4_k", 4.5, ratio=(9, 2)),  # 256 in 144
        Format("q6_k", 6.5625, ratio=(105, 16)),  # 256 in 210
        Format("mxfp4", 4.25, ratio=(17, 4)),  # 32 in 17, counted only
    )
}
BLOCKS = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")  # source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h
ALLOWED = {
    "weights": ("fp32", "fp16", "bf16", "fp8", "int8", "int4", *BLOCKS, "mxfp4"),
    "kv": ("fp32", "fp16", "bf16", "fp8", "int8"),
    "activations": ("fp32", "fp16", "bf16", "fp8"),
}
NUMERIC = {"weights": ("fp32", "fp16", "bf16", "int8", "int4"), "kv": ("fp32", "fp16", "bf16", "int8")}


def mixed_format(bits_per_weight):
    """The format of matrices that take `bits_per_weight` bits on average, scales included."""
    from decimal import Decimal  # only mixed formats need exact decimals

    try:
        bits = float("nan") if isinstance(bits_per_weight, bool) else float(bits_per_weight)
    except (TypeError, ValueError, OverflowError):
        bits = float("nan")
    if not 0 < bits <= 64:
        raise ConfigError(f"bits_per_weight is {bits_per_weight!r}, expected a number above 0 and at most 64, such as 4.83")
    # The name tells formats apart, so it has all the digits.
    return Format(f"{bits!r} bits", bits, ratio=Decimal(repr(bits)).as_integer_ratio())


@dataclass(frozen=True)
class Precision:
    """Storage formats of the three things that have one.

    Parameters
    ----------
    weights : {"fp32", "fp16", "bf16", "fp8", "int8", "int4"}
    kv : {"fp32", "fp16", "bf16", "fp8", "int8"}
    activations : {"fp32", "fp16", "bf16", "fp8"}
    bits_per_weight : float, optional
        Average bits of the matrices of a mixed format, scales included; takes
        the place of `weights` for matrices.
    exceptions : tuple of (tensor, layer or None, format), optional
        Tensors that are stored otherwise than `weights` says, matrices or
        vectors; None is every layer, and what lies outside them.

    Raises
    ------
    UnknownName
        If a format is not one of those listed.
    ConfigError
        If `bits_per_weight` is no number in (0, 64].
    """

    weights: Format = FORMATS["fp16"]
    kv: Format = FORMATS["fp16"]
    activations: Format = FORMATS["fp16"]
    bits_per_weight: float | None = None
    exceptions: tuple = ()

    def __post_init__(self):
        for field, known in ALLOWED.items():
            name = getattr(self, field)
            if name not in known:
                raise UnknownName(f"{field} format", name, known)
            object.__setattr__(self, field, FORMATS[name])
        if self.bits_per_weight is not None:
            mixed_format(self.bits_per_weight)
        exceptions = {}
        for exception in self.exceptions:
            if not isinstance(exception, list | tuple) or len(exception) != 3:
                raise ConfigError(f"an exception is {exception!r}, expected (tensor, layer or None, format)")
            tensor, layer, name = exception
            if name not in ALLOWED["weights"]:
                raise UnknownName(f"format of {tensor}", name, ALLOWED["weights"])
            exceptions[tensor, layer] = FORMATS[name]
        object.__setattr__(self, "exceptions", tuple([(*tensor, format_) for tensor, format_ in exceptions.items()]))
        object.__setattr__(self, "_exceptions", exceptions)

    def format_of(self, tensor, layer, is_matrix):
        """Format of a tensor of a layer (None: outside the layers)."""
        found = self._exceptions.get((tensor, layer)) or self._exceptions.get((tensor, None))
        return found or (self.matrices if is_matrix else self.vectors)

    def exceptions_of(self, layer):
        """Those of one layer by itself."""
        return tuple([(tensor, format_) for tensor, at, format_ in self.exceptions if at == layer])

    @property
    def matrices(self):
        """Format of projections, experts, embedding and head."""
        return self.weights if self.bits_per_weight is None else mixed_format(self.bits_per_weight)

    @property
    def vectors(self):
        """Format of gains and biases: 16 bits beside matrices of 8 bits or fewer."""
        return self.weights if self.weights.bits >= 16 else FORMATS["fp16"]

    def check_numeric(self, stored=None):
        """Raise `InputError` if real arrays cannot be held in these formats.

        Parameters
        ----------
        stored : callable, optional
            Gives the `Precision` that the values come in.  Blocks of a GGUF file are read, not made.
        """
        if self.bits_per_weight is not None:
            raise InputError("bits_per_weight is an average without values; leave it out or run shape-only")
        as_stored = False
        if stored is not None and (self.exceptions or self.weights in BLOCKS):
            of_file = stored()
            as_stored = (self.weights, self.exceptions) == (of_file.weights, of_file.exceptions)
        for field, known in NUMERIC.items():
            if field == "weights" and as_stored:
                continue
            if field == "weights" and self.exceptions:
                raise InputError("single tensors in formats of their own are read from a checkpoint that has them, not made")
            if getattr(self, field) not in known:
                raise InputError(
                    f"{field} format {str(getattr(self, field))!r} is shape-only; "
                    f"a numeric run holds {', '.join(known)}"
                )


def exceptions_to(usual, stored):
    """`Precision.exceptions` of tensors whose stored formats, {tensor: {layer: format}}, are not the `usual` one."""
    exceptions = []
    for tensor, formats in stored.items():
        if len(set(formats.values())) == 1:
            formats = {None: next(iter(formats.values()))}  # for every layer
        exceptions += [(tensor, layer, format_) for layer, format_ in formats.items() if format_ != usual]
    return tuple(exceptions)


def rounded(x, format_):
    """Values of the float32 array `x` rounded to fp16 or bf16, kept as float32; other formats return `x` itself.

    Ties go to even.  A value beyond fp16's largest becomes infinite, as in the hardware.
    """
    if format_ not in ("fp16", "bf16"):
        return x
    if format_ == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    upper = bits >> np.uint32(16)
    upper &= np.uint32(1)  # half of the last place, and a tie goes to the even neighbour
    upper += np.uint32(0x7FFF)
    upper += bits
    upper &= np.uint32(0xFFFF0000)
    nearest = upper.view(np.float32)
    return np.where(np.isnan(x), x, nearest) if np.isnan(x.max(initial=0)) else nearest


def quantised(values, format_):
    """Codes of an int8 or int4 array and the fp16 scales of its rows, or of their groups.

    Symmetric rounding to [-127, 127], or [-7, 7]; a scale is the largest |value|
    over the largest code, rounded to fp16 as it is stored, and the codes are
    made with that rounded scale.

    Parameters
    ----------
    values : float32 array (..., d)
    format_ : Format

    Returns
    -------
    codes : float32 array (..., d) of whole numbers
    scales : float32 array (..., n_groups), n_groups = 1 where a whole row shares one
    """
    d = values.shape[-1]
    largest_code = np.float32(2 ** (format_.bits - 1) - 1)
    largest = np.maximum.reduceat(np.abs(values), range(0, d, format_.group or d), axis=-1)
    scales = rounded(largest / largest_code, "fp16")
    # A group too small for an fp16 scale (or all zero) is stored as zeros.
    codes = np.rint(values / spread(np.where(scales > 0, scales, np.float32(np.inf)), d, format_))
    return np.clip(codes, -largest_code, largest_code, out=codes), scales


def spread(scales, d, format_):
    """The scale of each element of rows of `d`: (..., n_groups) -> (..., d), or (..., 1) where a row shares one."""
    return np.repeat(scales, format_.group, axis=-1)[..., :d] if format_.group else scales


def held(values, format_):
    """KV rows (..., d) as a cache holds them: rounded, or codes with their scale as one more column."""
    if format_.group is None:
        return rounded(values, format_)
    return np.concatenate(quantised(values, format_), axis=-1)


def unheld(rows, format_):
    """The values of rows that `held` made."""
    return rows if format_.group is None else rows[..., :-1] * rows[..., -1:]
