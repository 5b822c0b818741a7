"""Fitting the parameters of engines.toml to measurements.

The expected time of a phase is a sum of parameter * amount (`costmodel.expected`),
so that fitting is one linear problem with all engines in it: the parameters,
none negative, that make the sum of |log(predicted / measured)| least.  A sum of
absolute errors is led by the many rows and not by the few strange ones, of
which none is left out.

Read `rows`, `fit`, `cross_validated` (every row predicted by a fit that has not
seen its device), then `calibrate`.
"""

from typing import NamedTuple

import numpy as np

from costmodel import engines, expected, prediction
from npinfer.errors import InputError

ITERATIONS = 30  # of the reweighted least squares; the parameters move by less than 0.1 % after 20
NEAREST = 0.02  # relative error below which a row weighs no more
DEVICES_OF_RANGE = 6  # with fewer an engine has no range of its own
DEVICES_OF_PARAMETER = 2  # with fewer it would be unknown when one is left out, and keeps the value it has
RANGE = 0.1, 0.9


class Row(NamedTuple):
    """One measurement: the engine's table, what it has of each parameter, seconds that are not fitted, and measured ones."""

    measurement: object
    engine: object
    phase: str
    amounts: dict
    fixed_s: float
    least_s: float  # the roofline
    measured_s: float
    fitted: bool


def rows(measurements):
    """`Row` of each measurement whose device has the rates it takes."""
    found = []
    for measurement in measurements:
        config, precision, request = measurement.config, measurement.precision, measurement.request
        predicted = prediction.predict(
            config, precision, measurement.gpu, **request, engine=measurement.engine, n_gpus=measurement.n_gpus
        )
        works = prediction.works(config, precision, predicted.prefill, predicted.decode, **request)
        work = works[0 if measurement.prefill else 1]
        amounts, fixed_s = {}, 0.0
        for name, amount in expected.amounts(predicted.engine, predicted.gpu, predicted.compute, work):
            parameter = engines.parameters()[name]
            if amount is None:
                break
            if parameter.fixed:
                fixed_s += parameter.value * amount / work.n_forwards
            else:
                amounts[name] = amounts.get(name, 0.0) + amount / work.n_forwards
        else:
            least_s = predicted.roofline.ttft_s if measurement.prefill else predicted.roofline.tpot_s
            found.append(
                Row(
                    measurement,
                    predicted.engine,
                    "prefill" if measurement.prefill else "decode",
                    amounts,
                    fixed_s,
                    least_s or 0.0,
                    measurement.measured_s,
                    # Batched decode is one device's so far, and would outweigh the rest.
                    measurement.prefill or request["batch"] == 1,
                )
            )
    return found


def _matrix(rows, names):
    """Share of the measured seconds that each parameter explains a unit of, and that is fixed."""
    measured = np.array([row.measured_s for row in rows])
    shares = np.array([[row.amounts.get(name, 0.0) for name in names] for row in rows]) / measured[:, None]
    return shares, np.array([row.fixed_s for row in rows]) / measured


def determined(rows):
    """(names, rows): the parameters that the rows determine, and the rows with all others taken as they stand in the file."""
    devices = {}
    for row in rows:
        for name, amount in row.amounts.items():
            if amount and row.fitted:
                devices.setdefault(name, set()).add(row.measurement.gpu.name)
    known = engines.parameters()
    names = [name for name in known if len(devices.get(name, ())) >= DEVICES_OF_PARAMETER]
    kept = []
    for row in rows:
        others = [known[name].value * amount for name, amount in row.amounts.items() if name not in names]
        amounts = {name: amount for name, amount in row.amounts.items() if name in names}
        kept.append(row._replace(amounts=amounts, fixed_s=row.fixed_s + sum(others)))
    return names, kept


def _least_squares(a, b, weight, x):
    """Weighted least squares with no negative unknown: one unknown after another, until they stand still."""
    normal, right = a.T @ (weight[:, None] * a), a.T @ (weight * b)
    for _ in range(400):
        before = x.copy()
        for at in np.flatnonzero(np.diag(normal)):
            x[at] = max(0.0, x[at] + (right[at] - normal[at] @ x) / normal[at, at])
        if abs(x - before).max() <= 1e-9 * x.max(initial=1e-9):
            break
    return x


def fit(rows, names):
    """Values of the parameters `names`: those that bring the sum of |log(predicted / measured)| to its least.

    Least squares, each row weighed by 1 / |its error|: the sum of squares is then one of absolute values
    (iteratively reweighted least squares).
    """
    shares, fixed = _matrix(rows, names)
    scale = shares.max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    shares = shares / scale  # unknowns of similar size
    x, weight = np.zeros(len(names)), np.ones(len(rows))
    for _ in range(ITERATIONS):
        x = _least_squares(shares, 1 - fixed, weight, x)
        ratio = np.maximum(shares @ x + fixed, 1e-6)
        error, log_error = abs(ratio - 1), abs(np.log(ratio))
        weight = np.maximum(log_error, 1e-12) / np.maximum(error, 1e-12) / np.maximum(error, NEAREST)
    return dict(zip(names, (x / scale).tolist()))


def predict(row, values):
    """Expected seconds of a row by these parameter values."""
    return max(row.fixed_s + sum([values[name] * amount for name, amount in row.amounts.items()]), row.least_s)


def cross_validated(rows, names):
    """Predicted seconds of each row by parameters fitted without its device."""
    found = [None] * len(rows)
    for device in dict.fromkeys([row.measurement.gpu.name for row in rows]):
        others = [row for row in rows if row.fitted and row.measurement.gpu.name != device]
        values = fit(others, names)
        for at, row in enumerate(rows):
            if row.measurement.gpu.name == device:
                found[at] = predict(row, values)
    return found


def statistics(rows, predicted_s):
    """Rows, and of rows the median and 90th percentile error in the metric's unit and the range of measured / predicted."""
    if not rows:
        return {"rows": 0}
    errors = [abs(row.measurement.in_unit(s) / row.measurement.value - 1) for row, s in zip(rows, predicted_s)]
    median, p90 = np.percentile(errors, [50, 90]).tolist()
    return {"rows": len(rows), "error": median, "p90": p90, "range": range_of(rows, predicted_s)}


def range_of(rows, predicted_s):
    """10th and 90th percentile of measured / predicted seconds, every device weighing the same; None of too few devices."""
    names = [row.measurement.gpu.name for row in rows]
    if len(set(names)) < DEVICES_OF_RANGE:
        return None
    ratios = np.array([row.measured_s / s for row, s in zip(rows, predicted_s)])
    weight = np.array([1 / names.count(name) for name in names])
    order = np.argsort(ratios)
    middle = np.cumsum(weight[order]) - weight[order] / 2
    return np.interp(RANGE, middle / weight.sum(), ratios[order]).tolist()


def coverage(rows, predicted_s):
    """Share of each device's rows inside the range of the other devices' residuals: device -> (rows, share).

    The range of the same engine and phase, or of all engines where too few devices have that one; rows of a phase
    that too few devices have at all are left out.
    """
    found = {}
    known = [(row, s) for row, s in zip(rows, predicted_s) if row.fitted]
    for device in dict.fromkeys([row.measurement.gpu.name for row, _ in known]):
        others = [(row, s) for row, s in known if row.measurement.gpu.name != device]
        spans, inside = {}, []
        for row, s in known:
            if row.measurement.gpu.name != device:
                continue
            key = row.engine.name, row.phase
            if key not in spans:
                phase = [(other, t) for other, t in others if other.phase == row.phase]
                own = [(other, t) for other, t in phase if other.engine.name == row.engine.name]
                spans[key] = (own and range_of(*zip(*own))) or (phase and range_of(*zip(*phase)))
            if spans[key]:
                low, high = spans[key]
                inside.append(low <= row.measured_s / s <= high)
        if inside:
            found[device] = len(inside), float(np.mean(inside))
    return found


def calibrate(rows):
    """Everything that `tools/calibrate.py` prints and writes.

    Returns
    -------
    dict
        "parameters": name -> value, rows, devices; "engines": name -> phase -> `statistics` of
        cross-validated predictions, generic's those of all engines; "predicted_s": those, in the
        order of `rows`; "coverage".

    Raises
    ------
    InputError
        If the rows determine no parameter.
    """
    names, rows = determined(rows)
    if not names:
        raise InputError(
            f"no parameter can be fitted: each takes rows of {DEVICES_OF_PARAMETER} devices at least; add measurements"
        )
    fitted = [row for row in rows if row.fitted]
    values, predicted_s = fit(fitted, names), cross_validated(rows, names)
    found = {}
    for name, value in values.items():
        devices = [row.measurement.gpu.name for row in fitted if row.amounts.get(name)]
        found[name] = {"value": value, "rows": len(devices), "devices": len(set(devices))}
    by_engine = {name: {} for name in engines.names()}
    for name, phases in by_engine.items():
        for phase in ("decode", "prefill"):
            pairs = [
                (row, s) for row, s in zip(rows, predicted_s)
                if row.fitted and row.phase == phase and name in (row.engine.name, "generic")
            ]  # fmt: skip
            phases[phase] = statistics(*zip(*pairs)) if pairs else {"rows": 0}
    return {
        "parameters": found, "engines": by_engine, "predicted_s": predicted_s, "coverage": coverage(rows, predicted_s),
    }  # fmt: skip
