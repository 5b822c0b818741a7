#!/usr/bin/env python3
"""The textbook chapter's claims and numbers, each computed: what the text says, what its formula gives, the exact count.

    python tools/textbook.py
    python tools/textbook.py --section 12.1
    python tools/textbook.py --section 9 --model llama-3-8b --gpu h100-sxm --eta 0.5 --format json

text     what the chapter says: a number with the digits that it prints, in the row's unit; a claim without a number
         in words; nothing (a dash, null) where it says nothing
formula  what its formula gives, from its own rounded intermediates where it has some
exact    what exact counting gives: closed forms, or a run; times are floors, which no kernel beats. A dash (null) is
         undefined, or lacks a rate of the GPU

Rows that quote a number keep the chapter's example: the Mistral-7B shape in fp16 at 1008 GB/s, 1000 prompt and 100
output tokens. --model, --gpu and --eta are for the others.
"""

import textwrap

from common import Parser, csv_text, run, table, write

from costmodel.textbook import SECTIONS, chapter
from costmodel.textbook_rows import Row, Setting

WIDTH = 120


def parser():
    parser = Parser(prog="textbook.py", description=__doc__)
    parser.add_argument("--section", metavar="N", help="one section, such as 12.1, or those below one, such as 12")
    parser.add_argument("--model", metavar="NAME", default="mistral-7b", help="a known shape (default mistral-7b)")
    parser.add_argument("--gpu", metavar="NAME|FILE.toml", default="rtx-4090", help="(default rtx-4090)")
    parser.add_argument("--eta", type=float, default=0.6, metavar="X",
        help="share of the peak that kernels reach (default 0.6)")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    parser.add_argument("--output", metavar="FILE", help="write there instead of printing")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    setting = Setting.of(args.model, args.gpu, args.eta)
    write(FORMATS[args.format](chapter(setting, args.section), setting), args.output)


def number(value):
    """As it is printed: four digits, or all of a whole number; None is a dash."""
    if value is None or isinstance(value, str):
        return value or "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


def as_text(rows, setting):
    text = [
        f"{setting.config.name} on {setting.gpu.name}, eta {setting.eta:g}; "
        "rows that quote a number keep the chapter's example"
    ]
    cells = [
        (row.quantity, f"{row.text:,}" if isinstance(row.text, int | float) else number(row.text),
         number(row.formula), number(row.exact), row.unit)
        for row in rows
    ]  # fmt: skip
    header, *lines = table(cells, ["", "text", "formula", "exact", "unit"]).splitlines()
    text.append(f"  {header}")
    section = None
    for row, line in zip(rows, lines):
        if row.section != section:
            section = row.section
            text += ["", f"{section}  {SECTIONS[section][0]}"]
        text.append(f"  {line}")
        if row.note:
            text += textwrap.wrap(row.note, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(line.rstrip() for line in text)


def as_json(rows, setting):
    import json

    return json.dumps({"rows": [row._asdict() for row in rows]}, indent=1)


def as_csv(rows, setting):
    return csv_text(Row._fields, rows)


FORMATS = {"table": as_text, "json": as_json, "csv": as_csv}


if __name__ == "__main__":
    run(main)
