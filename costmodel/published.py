"""What published tables call things: devices, models, stored weights and engines, as this project knows them.

Read `gpu_name`, `model_config`, `weight_bits` (what the weights of a row weigh), then `engine_name`.
"""

import difflib
import re
from functools import cache, lru_cache

from costmodel import engines, experts, formulas
from npinfer import Precision, preset, presets
from npinfer.errors import InputError, UnknownName
from npinfer.formats import FORMATS

LARGEST = 10**12  # of a count: more is a slip, or a number of bytes in its column
_KV = {"f16": "fp16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8",
       "q8_0": "int8", "int8": "int8", "f32": "fp32", "fp32": "fp32", "": "fp16"}  # fmt: skip
# Bits of a weight where a row has the name of its format only; with fp16 scales, of groups of 32 unless the name says.
_NAMED_BITS = (
    (r"^(?!.*(int\d|fp[468]\b|quant|\bq\d|\d-?bit|sparse)).*\b(f16|fp16|float16|bf16|bfloat16)\b", 16.0),
    (r"q8_0", 8.5), (r"q4_0", 4.54), (r"q4_k", 4.85), (r"mxfp4", 4.25), (r"q4f16", 4.5),
    (r"\b(fp8|int8|w8a8|w8a16)\b", 8.0),
)  # fmt: skip
_GROUP = re.compile(r"\b(gptq|awq|exl2?)\b.*?\b([348])[- ]?bit(?:.*?\bg(\d+))?")


def number_in(row, column, whole=False):
    """The cell as a number above zero (a count may be zero), or None where it is empty."""
    text = row.get(column, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"{column} is {text!r}, expected a plain number without a unit") from None
    if not (0 <= number if whole else 0 < number) or number == float("inf"):
        raise InputError(f"{column} is {text}, expected a number {'of 0 or more' if whole else 'above 0'}")
    if whole and number > LARGEST:
        raise InputError(f"{column} is {text}, expected at most {LARGEST}")
    if whole and number != int(number):
        raise InputError(f"{column} is {text}, expected a whole number")
    return int(number) if whole else number


def gpu_name(device):
    """The profile's name of a device: lower case, the vendor's name and "GeForce" dropped (Apple kept), hyphens between.

    >>> gpu_name("NVIDIA GeForce RTX 4060 Ti")
    'rtx-4060-ti'
    """
    text = re.sub(r"\b(nvidia|amd|intel|geforce)\b", " ", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


# What names of one model differ by; the shape is the same.
_REMARKS = re.compile(r"\(.*?\)|\b(meta|instruct|chat|base|text|it|hf|gguf)\b")


def _plain(name):
    """A model's name without its owner, remarks and separators: "Meta-Llama-3-8B-Instruct" is "llama38b"."""
    return re.sub(r"[^a-z0-9.]", "", _REMARKS.sub(" ", name.lower().rpartition("/")[2].replace("_", "-")))


@cache
def _plain_presets():
    return {_plain(name): name for name in presets()}


@lru_cache(maxsize=256)
def model_config(name):
    """The shape of a model by its published name: "Llama-2-7B", "Meta Llama 3 8B Instruct", "Gemma-3-4B (text)".

    Raises
    ------
    UnknownName
        If there is no preset of that name; the message lists those that are close.
    """
    known = _plain_presets()
    if _plain(name) in known:
        return preset(known[_plain(name)])
    close = difflib.get_close_matches(_plain(name), known, 4, 0.4)
    raise UnknownName("model", name, [known[each] for each in close] or presets()[:4])


def weight_bits(row, config):
    """Average bits of a stored weight, by the row's own columns.

    The size of the file, over all parameters (or those without the embedding,
    where the note says that it is left out); else bits_per_weight; else the
    name of the format: AWQ and GPTQ have fp16 scales and zeros in each group, and a 16-bit embedding and head.
    """
    nbytes = number_in(row, "weight_file_bytes")
    gib = number_in(row, "weight_file_gib")
    bits = number_in(row, "bits_per_weight")
    if nbytes or gib:
        partial = "embedding excluded" in row.get("note", "")
        stored = formulas.n_streamed_parameters(config) if partial else formulas.n_parameters(config)
        return 8 * (nbytes or gib * 2**30) / stored
    if bits:
        return bits
    quant = row.get("quant", "").lower()
    grouped = _GROUP.search(quant)
    if grouped:
        matrices = int(grouped[2]) + (16 + 4) / int(grouped[3] or 128)  # a 16-bit scale and a 4-bit zero for each group
        tables = 2 * config.vocab_size * config.d_model
        n = formulas.n_parameters(config) + (tables // 2 if config.tie_embeddings else 0)
        return (matrices * (n - tables) + 16 * tables) / n
    for pattern, bits in _NAMED_BITS:
        if re.search(pattern, quant):
            return bits
    raise InputError(
        f"quant {row.get('quant', '')!r} does not say how many bits a weight takes; give weight_file_bytes or bits_per_weight"
    )


def precision_of(row, config):
    bits, exceptions = weight_bits(row, config), ()
    if not 0.5 <= bits <= 32.5:
        raise InputError(f"the weights would take {bits:.3g} bits each by the row's size, expected 1 to 32")
    kv = row.get("kv_dtype", "").strip().lower()
    if kv not in _KV:
        raise InputError(f"kv_dtype is {kv!r}, expected one of {', '.join(filter(None, _KV))}")
    quant = row.get("quant", "").lower()
    if "mxfp4" in quant and config.experts:
        bits, exceptions = _beside_mxfp4(bits, config)
    sixteen = 15.9 <= bits <= 16.1
    return Precision(
        weights="bf16" if sixteen and "bf" in quant else "fp16",
        kv=_KV[kv],
        bits_per_weight=None if sixteen else bits,
        exceptions=exceptions,
    )


def _beside_mxfp4(bits, config):
    """Bits of the other weights where experts are stored as MXFP4 and all together take `bits` on average; the exceptions."""
    names = [matrix.name for matrix in experts.projections(config)]
    sparse = [layer for layer, kind in enumerate(config.kinds) if kind.sparse]
    n_experts = sum([matrix.n_parameters for matrix in experts.projections(config)])
    n = formulas.n_parameters(config)
    rest = (bits * n - FORMATS["mxfp4"].bits * n_experts) / (n - n_experts)
    if not 4 <= rest <= 32.5:
        raise InputError(f"weights beside MXFP4 experts would take {rest:.3g} bits each by the row's size, expected 4 to 32")
    return rest, tuple([(name, layer, "mxfp4") for name in names for layer in sparse])


def engine_name(row):
    """The engine of a row as `costmodel.engine` takes it: its name, back end, version, and whether attention is fused."""
    engine, backend, note = (row.get(column, "").strip() for column in ("engine", "backend", "note"))
    name = f"{engine} {row.get('engine_version', '')}"
    try:
        profile = engines.engine(name)
    except UnknownName:
        return "generic"
    if not profile.name.startswith("llama.cpp"):
        return name
    if backend.lower().startswith("vulkan"):
        name = "llama.cpp-vulkan"
    fused = re.search(r"flash attention on|-fa 1\b", note)
    return f"{name} {'fused' if fused else 'unfused'}"
