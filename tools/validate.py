#!/usr/bin/env python3
"""Predict every measurement of a CSV file from its own columns, and say how far off each level is.

    python tools/validate.py tests/data/measurements-sample.csv
    python tools/validate.py FILE.csv --format json --output result.json

Errors are |predicted / measured - 1|, as median and 90th percentile.  A floor violation is a measurement better than the
floor of the format that the engine computes in.  Columns: tests/data/README.md.
"""


from common import Parser, csv_text, run, table, write

from costmodel import measurements, validation

HEADERS = ("metric", "batch", "engine", "rows", "floor viol.", "floor", "roofline", "expected", "in range")


def parser():
    parser = Parser(prog="validate.py", description=__doc__)
    parser.add_argument("file", metavar="FILE.csv")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    parser.add_argument("--output", metavar="FILE", help="write there instead of printing")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    result = validation.validate(*measurements.read(args.file))
    if args.format == "json":
        import json

        return write(json.dumps(result, indent=1), args.output)
    write((as_csv if args.format == "csv" else as_text)(result), args.output)


def as_text(result):
    parts = [groups(result)]
    for title, rows in (("floor violations", result["floor_violations"]), ("worst rows", result["worst"])):
        if rows:
            parts.append(title + "\n" + table([_cells(row) for row in rows], _ROW_HEADERS))
    if result["skipped"]:
        parts.append("skipped\n" + table([[reason, count] for reason, count in result["skipped"].items()]))
    return "\n\n".join(parts)


def groups(result):
    """The groups as a table."""
    rows = [
        [group["metric"], group["batch"], group["engine"], group["rows"], group["floor_violations"]]
        + [_errors(group[level]) for level in validation.LEVELS]
        + [_percent(group["interval_coverage"])]
        for group in result["groups"]
    ]
    return table(rows, HEADERS)


_ROW_HEADERS = ("id", "device", "model", "engine", "metric", "measured", *validation.LEVELS, "error")


def _cells(row):
    names = [row[name] for name in ("id", "device", "model", "engine", "metric")]
    return names + [_number(row[name]) for name in ("measured", *validation.LEVELS)] + [_percent(row["error"])]


def _errors(errors):
    return "-" if errors["median_error"] is None else f"{100 * errors['median_error']:.1f} / {100 * errors['p90_error']:.1f} %"


def _number(value):
    return "-" if value is None else f"{value:.4g}"


def _percent(share):
    return "-" if share is None else f"{100 * share:.0f} %"


def as_csv(result):
    """The groups, one a line."""
    names = ("metric", "engine", "batch", "rows", "floor_violations")
    errors = [(level, error) for level in validation.LEVELS for error in ("median_error", "p90_error")]
    header = [*names, *[f"{level}_{error}" for level, error in errors], "interval_coverage"]
    rows = [
        [*[group[name] for name in names], *[group[level][error] for level, error in errors], group["interval_coverage"]]
        for group in result["groups"]
    ]
    return csv_text(header, rows)


if __name__ == "__main__":
    run(main)
