"""Published measurements: a CSV row becomes a request that can be predicted, or the reason why not.

Read `COLUMNS`, `weight_bits` (what the weights of a row weigh), `model_config`
(the shape behind a name), then `read`.
"""

import csv
import difflib
import os
import re
from functools import cache, lru_cache
from typing import NamedTuple

from costmodel import engines, experts, formulas, parallel
from costmodel.profiles import gpu as gpu_profile
from npinfer import ModelConfig, Precision, preset, presets
from npinfer.errors import InputError, UnknownName
from npinfer.formats import FORMATS

METRICS = ("decode_tok_s", "prefill_tok_s", "ttft_ms", "tpot_ms")
COLUMNS = (
    "id", "source", "model", "shape", "quant", "bits_per_weight", "weight_file_gib", "weight_file_bytes", "kv_dtype",
    "device", "n_gpu", "batch", "prompt_tokens", "output_tokens", "context_start", "metric", "value", "engine", "backend",
    "engine_version", "quality", "note",
)  # fmt: skip
NEEDED = {"device", "batch", "prompt_tokens", "output_tokens", "context_start", "metric", "value", "engine", "model"}
_KV = {"f16": "fp16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8",
       "q8_0": "int8", "int8": "int8", "f32": "fp32", "fp32": "fp32", "": "fp16"}  # fmt: skip
# Bits of a weight where a row has the name of its format only; with fp16 scales, of groups of 32 unless the name says.
_NAMED_BITS = (
    (r"^(?!.*(int\d|fp[468]\b|quant|\bq\d|\d-?bit|sparse)).*\b(f16|fp16|float16|bf16|bfloat16)\b", 16.0),
    (r"q8_0", 8.5), (r"q4_0", 4.54), (r"q4_k", 4.85), (r"mxfp4", 4.25), (r"q4f16", 4.5),
    (r"\b(fp8|int8|w8a8|w8a16)\b", 8.0),
)  # fmt: skip
_GROUP = re.compile(r"\b(gptq|awq|exl2?)\b.*?\b([348])[- ]?bit(?:.*?\bg(\d+))?")


class Measurement(NamedTuple):
    """One row that can be predicted.

    Attributes
    ----------
    row : dict
        Its cells as they stand in the file.
    engine : str
        As `costmodel.engine` takes it; "generic" for one that is not listed.
    request : dict
        n_prompt, n_output, batch and n_cached of `predict`.
    prefill : bool
        Whether a prefill is timed, or else decode steps.
    tokens : int or None
        That are divided by the time; None where the metric is a time, in ms.
    value : float
        What was measured, in the metric's unit.  Nothing here uses it.
    """

    row: dict
    config: ModelConfig
    precision: Precision
    gpu: object
    n_gpus: int
    engine: str
    request: dict
    prefill: bool
    tokens: int | None
    value: float

    def in_unit(self, seconds):
        """What a prefill, or a decode step, of so many seconds is in the metric's unit."""
        return 1e3 * seconds if self.tokens is None else self.tokens / seconds

    @property
    def measured_s(self):
        """Seconds of the prefill, or of a decode step."""
        return self.value / 1e3 if self.tokens is None else self.tokens / self.value


def _number(row, column, whole=False):
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
    nbytes = _number(row, "weight_file_bytes")
    gib = _number(row, "weight_file_gib")
    bits = _number(row, "bits_per_weight")
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


def _precision(row, config):
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


def _measurement(row):
    if row.get("quality", "").strip() == "C":
        raise InputError("quality C")
    metric = row["metric"].strip()
    if metric not in METRICS:
        raise InputError(f"metric {metric!r} is not predicted, expected one of {', '.join(METRICS)}")
    value, batch = _number(row, "value"), _number(row, "batch", whole=True)
    for column, number in (("value", value), ("batch", batch)):
        if not number:
            raise InputError(f"{column} is {'empty' if number is None else number}")
    config = model_config((row.get("shape") or row["model"]).strip())
    n_cached = _number(row, "context_start", whole=True)
    n_prompt, n_output = (_number(row, column, whole=True) for column in ("prompt_tokens", "output_tokens"))
    prefill = metric in ("prefill_tok_s", "ttft_ms")
    if prefill and not n_prompt:
        raise InputError(f"prompt_tokens is {'empty' if n_prompt is None else n_prompt}: a prefill of unknown length")
    if prefill:
        n_cached = n_cached or 0
        request = {"n_prompt": n_cached + n_prompt, "n_cached": n_cached, "n_output": 1}
    else:  # n_output steps on a cache of context_start rows; from an empty cache the first step is taken to see one
        start = n_prompt if n_cached is None else n_cached
        request = {"n_prompt": max(1, start or 0), "n_cached": 0, "n_output": 1 + (n_output or 1)}
    gpu, n_gpus = gpu_profile(gpu_name(row["device"])), _number(row, "n_gpu", whole=True) or 1
    parallel.together(gpu, n_gpus, config)  # refuses what cannot be shared out
    return Measurement(
        row=row,
        config=config,
        precision=_precision(row, config),
        gpu=gpu,
        n_gpus=n_gpus,
        engine=engine_name(row),
        request=request | {"batch": batch},
        prefill=prefill,
        tokens=None if metric.endswith("_ms") else batch * (n_prompt if prefill else 1),
        value=value,
    )


def read(path):
    """The rows of a CSV file of measurements.

    Returns
    -------
    measurements : list of Measurement
    skipped : list of (str, str)
        (id or line number, reason) of each row that cannot be predicted.

    Raises
    ------
    InputError
        If the file cannot be read, or no row of it can be predicted.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of a CSV file") from None
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path}: is not CSV in UTF-8 ({error})") from None
    header = [column.strip() for column in lines[0]] if lines else []
    wrong = _wrong_columns(header)
    measurements, skipped = [], []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cells):
            continue
        row = dict(zip(header, cells))
        name = row.get("id", "").strip() or f"line {number}"
        try:
            if wrong:
                raise InputError(wrong)
            if len(cells) != len(header):
                raise InputError(f"{len(cells)} cells, expected {len(header)}")
            measurements.append(_measurement(row))
        except InputError as error:
            skipped.append((name, str(error)))
    if not measurements:
        why = wrong or (f"{skipped[0][0]}: {skipped[0][1]}" if skipped else "it has no rows")
        raise InputError(f"{os.path.basename(path)}: nothing in it can be predicted; {why}")
    return measurements, skipped


def _wrong_columns(header):
    """What is wrong with the columns, or None."""
    unknown = [column for column in header if column not in COLUMNS]
    missing = sorted(NEEDED - set(header))
    if not unknown and not missing:
        return None
    parts = [f"column {', '.join(missing)} is missing"] if missing else []
    for column in unknown:
        close = difflib.get_close_matches(column, COLUMNS, 1)
        parts.append(f"column {column!r} is unknown" + (f", did you mean {close[0]}?" if close else ""))
    return "; ".join(parts)
