#!/usr/bin/env python3
"""Fit the engine profiles to published measurements, and say how well they predict devices not seen; or measure this machine.

    python tools/calibrate.py engines MEASUREMENTS.csv             # print
    python tools/calibrate.py engines MEASUREMENTS.csv --write     # and write costmodel/engines.toml
    python tools/calibrate.py host --output host.toml              # measure this machine: a profile for --gpu host.toml
"""

import datetime
import re

from common import Parser, run, table, write

from costmodel import calibration, engines, measurements
from npinfer.errors import InputError


def day(text):
    """A date, whose text can stand in a TOML file."""
    return datetime.date.fromisoformat(text)


def parser():
    parser = Parser(prog="calibrate.py", description=__doc__)
    parser.add_argument("what", choices=("engines", "host"))
    parser.add_argument("file", metavar="FILE.csv", nargs="?", help="measurements, columns as in tests/data/README.md (engines)")
    parser.add_argument("--output", metavar="FILE.toml", help="write the profile there instead of printing (host)")
    parser.add_argument("--write", action="store_true", help="write what was found into the profiles")
    today = datetime.date.today()
    parser.add_argument("--date", type=day, default=today, metavar="YYYY-MM-DD", help="of the calibration (default today)")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    if args.what == "host":
        from costmodel import host

        if args.file or args.write:
            raise InputError("host measures this machine and takes neither FILE.csv nor --write; give --output host.toml")
        return write(host.as_profile(host.measured(), args.date).rstrip("\n"), args.output)
    if args.file is None or args.output:
        raise InputError("engines takes a file of measurements, and no --output: tools/calibrate.py engines FILE.csv [--write]")
    usable, skipped = measurements.read(args.file)
    found = calibration.calibrate(calibration.rows(usable))
    write(as_text(found, len(usable), len(skipped)))
    if args.write:
        with open(engines.FILE, encoding="utf-8") as file:
            text = file.read()
        write(updated(text, found, args.date).rstrip("\n"), engines.FILE)


def as_text(found, n_usable, n_skipped):
    """The parameters with their rows, and the errors of each engine."""
    known = engines.parameters()
    rows = [
        [name, f"{each['value']:.4g}", known[name].unit, each["rows"], each["devices"]]
        for name, each in found["parameters"].items()
    ]
    parts = [
        f"{n_usable} rows, {n_skipped} skipped (tools/validate.py says why); {len(rows)} parameters fitted",
        table(rows, ["parameter", "value", "unit", "rows", "devices"]),
    ]
    rows = []
    for name, phases in found["engines"].items():
        for phase, each in phases.items():
            if each["rows"]:
                span = "-" if each["range"] is None else "{:.2f} to {:.2f}".format(*each["range"])
                rows.append([name, phase, each["rows"], _percent(each["error"]), _percent(each["p90"]), span])
    headers = ["engine", "phase", "rows", "median error", "90th percentile", "measured / predicted"]
    parts.append("cross-validated by device; generic: all engines\n" + table(rows, headers))
    shares = [share for _, share in found["coverage"].values()]
    inside = "unknown, of too few devices"
    if shares:
        inside = f"{_percent(sum(shares) / len(shares))} of a device's rows, mean over {len(shares)} devices"
    parts.append(f"inside the range of the other devices: {inside}")
    return "\n\n".join(parts)


def _percent(share):
    return f"{100 * share:.1f} %"


def updated(text, found, date):
    """The text of engines.toml with the numbers found in the places of the old ones."""
    values = {name: {key: f"{value:.4g}" for key, value in each.items()} for name, each in found["parameters"].items()}
    for name, phases in found["engines"].items():
        values[name] = {"date": f'"{date}"'} if any(each["rows"] for each in phases.values()) else {}
        for phase, each in phases.items():
            values[name][f"rows_{phase}"] = str(each["rows"])
            if each["rows"]:
                values[name] |= {f"error_{phase}": f"{each['error']:.3f}", f"p90_{phase}": f"{each['p90']:.3f}"}
                if each["range"] is not None:
                    values[name][f"range_{phase}"] = "[{:.3f}, {:.3f}]".format(*each["range"])
    sections = re.split(r"(?m)^(?=\[)", text)
    return "".join(_section(section, values) for section in sections)


def _section(section, values):
    """One table with its calibrated keys replaced, or added behind the others."""
    header = re.match(r'\["?([^"\]]+)"?\]\n', section)
    if header is None or header[1] not in values:
        return section
    body, tail = section.rstrip("\n"), section[len(section.rstrip("\n")) :]
    kept = [line for line in body.split("\n") if not re.match(r"(error|p90|range)_\w+ =", line)]
    for key, value in values[header[1]].items():
        places = [at for at, line in enumerate(kept) if line.startswith(f"{key} = ")]
        if places:
            kept[places[0]] = f"{key} = {value}"
        else:
            kept.append(f"{key} = {value}")
    return "\n".join(kept) + tail


if __name__ == "__main__":
    run(main)
