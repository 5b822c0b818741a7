"""Predictions beside measurements: errors by metric, engine and batch.

Every row is predicted from its own columns; what was measured is only compared
with.  A floor violation is a measurement better than the floor of the format that the
engine computes in: either the measurement, the device's rates or the shape is not
what the row says, or the floor is wrong.
"""

from typing import NamedTuple

import numpy as np

from costmodel.prediction import predict
from npinfer.errors import InputError

LEVELS = ("floor", "roofline", "expected")
N_WORST = 10
TOUCH = 1e-3  # a measurement this close to the floor is rounded, not better


class Outcome(NamedTuple):
    """A measurement and what each level says of it, in the metric's unit; None where a rate is missing."""

    measurement: object
    levels: dict
    inside: bool | None
    better_than_floor: bool


def outcome(measurement):
    """Predict one measurement."""
    predicted = predict(
        measurement.config, measurement.precision, measurement.gpu, **measurement.request,
        engine=measurement.engine, n_gpus=measurement.n_gpus,
    )  # fmt: skip
    which = "ttft_s" if measurement.prefill else "tpot_s"
    times = {level: getattr(getattr(predicted, level), which) for level in LEVELS}
    span = getattr(predicted.expected, which.replace("_s", "_range_s"))
    measured_s = measurement.measured_s
    return Outcome(
        measurement,
        {level: None if s is None else measurement.in_unit(s) for level, s in times.items()},
        None if span is None else span[0] <= measured_s <= span[1],
        times["floor"] is not None and measured_s < times["floor"] * (1 - TOUCH),
    )


def _error(outcome_, level):
    predicted = outcome_.levels[level]
    return None if predicted is None else predicted / outcome_.measurement.value - 1


def _errors(outcomes, level):
    """Median and 90th percentile of |predicted / measured - 1|, None where nothing is predicted."""
    errors = [abs(error) for error in (_error(each, level) for each in outcomes) if error is not None]
    median, p90 = np.percentile(errors, [50, 90]).tolist() if errors else (None, None)
    return {"median_error": median, "p90_error": p90}


def _group(metric, engine, batch, outcomes):
    inside = [each.inside for each in outcomes if each.inside is not None]
    return {
        "metric": metric,
        "engine": engine,
        "batch": batch,
        "rows": len(outcomes),
        "floor_violations": sum([each.better_than_floor for each in outcomes]),
        **{level: _errors(outcomes, level) for level in LEVELS},
        "interval_coverage": float(np.mean(inside)) if inside else None,
    }


def _row(each):
    row = each.measurement.row
    return {
        **{name: row.get(name, "") for name in ("id", "device", "model", "quant", "engine", "metric")},
        "batch": each.measurement.request["batch"],
        "measured": each.measurement.value,
        **each.levels,
        "error": _error(each, "expected"),
    }


def validate(measurements, skipped):
    """Groups of rows with their errors, what was skipped and why, the worst rows, and the floor violations.

    Parameters
    ----------
    measurements : list of Measurement
    skipped : list of (str, str)
        As `measurements.read` gives them.

    Returns
    -------
    dict
        Ready for JSON; its keys are in the README, "Against measurements".
    """
    groups, outcomes = {}, []
    for measurement in measurements:
        name = measurement.row.get("id", "").strip()
        try:
            each = outcome(measurement)
        except InputError as error:
            skipped = [*skipped, (name, str(error))]
            continue
        if all([value is None for value in each.levels.values()]):
            reason = f"{measurement.gpu.name} has no rate that the prediction needs"
            skipped = [*skipped, (name, reason)]
            continue
        outcomes.append(each)
        batch = "1" if measurement.request["batch"] == 1 else ">1"
        metric = measurement.row["metric"].strip()
        for engine in ("all", measurement.row["engine"].strip()):
            groups.setdefault((metric, batch, engine), []).append(each)
    order = sorted(groups, key=lambda key: (key[0], key[1] != "1", key[2] != "all", key[2].lower()))
    reasons = {}
    for _, reason in skipped:
        reasons[reason] = reasons.get(reason, 0) + 1
    predicted = [each for each in outcomes if each.levels["expected"] is not None]
    worst = sorted(predicted, key=lambda each: -abs(_error(each, "expected")))[:N_WORST]
    return {
        "groups": [_group(metric, engine, batch, groups[metric, batch, engine]) for metric, batch, engine in order],
        "skipped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        "worst": [_row(each) for each in worst],
        "floor_violations": [_row(each) for each in outcomes if each.better_than_floor],
        "skipped_rows": [{"id": name, "reason": reason} for name, reason in skipped],
    }
