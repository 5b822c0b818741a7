"""Published measurements: a CSV row becomes a request that can be predicted, or the reason why not.

Read `COLUMNS`, `Measurement`, then `read`; `costmodel.published` knows what the cells mean.
"""

import csv
import difflib
import os
from typing import NamedTuple

from costmodel import parallel
from costmodel.profiles import gpu as gpu_profile
from costmodel.published import engine_name, gpu_name, model_config, number_in, precision_of
from npinfer import ModelConfig, Precision
from npinfer.errors import InputError

METRICS = ("decode_tok_s", "prefill_tok_s", "ttft_ms", "tpot_ms")
COLUMNS = (
    "id", "source", "model", "shape", "quant", "bits_per_weight", "weight_file_gib", "weight_file_bytes", "kv_dtype",
    "device", "n_gpu", "batch", "prompt_tokens", "output_tokens", "context_start", "metric", "value", "engine", "backend",
    "engine_version", "quality", "note",
)  # fmt: skip
NEEDED = {"device", "batch", "prompt_tokens", "output_tokens", "context_start", "metric", "value", "engine", "model"}


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


def _measurement(row):
    if row.get("quality", "").strip() == "C":
        raise InputError("quality C")
    metric = row["metric"].strip()
    if metric not in METRICS:
        raise InputError(f"metric {metric!r} is not predicted, expected one of {', '.join(METRICS)}")
    value, batch = number_in(row, "value"), number_in(row, "batch", whole=True)
    for column, number in (("value", value), ("batch", batch)):
        if not number:
            raise InputError(f"{column} is {'empty' if number is None else number}")
    config = model_config((row.get("shape") or row["model"]).strip())
    n_cached = number_in(row, "context_start", whole=True)
    n_prompt, n_output = (number_in(row, column, whole=True) for column in ("prompt_tokens", "output_tokens"))
    prefill = metric in ("prefill_tok_s", "ttft_ms")
    if prefill and not n_prompt:
        raise InputError(f"prompt_tokens is {'empty' if n_prompt is None else n_prompt}: a prefill of unknown length")
    if prefill:
        n_cached = n_cached or 0
        request = {"n_prompt": n_cached + n_prompt, "n_cached": n_cached, "n_output": 1}
    else:  # n_output steps on a cache of context_start rows; from an empty cache the first step is taken to see one
        start = n_prompt if n_cached is None else n_cached
        request = {"n_prompt": max(1, start or 0), "n_cached": 0, "n_output": 1 + (n_output or 1)}
    gpu, n_gpus = gpu_profile(gpu_name(row["device"])), number_in(row, "n_gpu", whole=True) or 1
    parallel.together(gpu, n_gpus, config)  # refuses what cannot be shared out
    return Measurement(
        row=row,
        config=config,
        precision=precision_of(row, config),
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
    missing, unknown = _missing(header), _unknown(header)
    measurements, skipped = [], []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cells):
            continue
        row = dict(zip(header, cells))
        name = row.get("id", "").strip() or f"line {number}"
        try:
            if missing:
                raise InputError(missing)
            if len(cells) != len(header):
                raise InputError(f"{len(cells)} cells, expected {len(header)}")
            unused = [unknown[column] for column, cell in zip(header, cells) if column in unknown and cell.strip()]
            if unused:  # it may say what another column says, or change what they mean
                raise InputError("; ".join(unused))
            measurements.append(_measurement(row))
        except InputError as error:
            skipped.append((name, str(error)))
    if not measurements:
        why = missing or (f"{skipped[0][0]}: {skipped[0][1]}" if skipped else "it has no rows")
        raise InputError(f"{os.path.basename(path)}: nothing in it can be predicted; {why}")
    return measurements, skipped


def _missing(header):
    """Which columns a row cannot do without, or None if they are there."""
    missing = [column for column in COLUMNS if column in NEEDED and column not in header]
    return f"column {', '.join(missing)} is missing" if missing else None


def _unknown(header):
    """Columns that say nothing here, or say it twice: name -> what is wrong with it."""
    wrong = {}
    for column in header:
        if column not in COLUMNS:
            close = difflib.get_close_matches(column, COLUMNS, 1)
            wrong[column] = f"column {column!r} is unknown" + (f", did you mean {close[0]}?" if close else "")
        elif header.count(column) > 1:
            wrong[column] = f"column {column} is there {header.count(column)} times"
    return wrong
