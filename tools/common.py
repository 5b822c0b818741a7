"""What the command-line programs share: one-line errors, units, tables, progress."""

import argparse
import os
import sys

from npinfer import InputError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which looks for the folder of --output before hours are spent."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_args(self, *given):
        args = super().parse_args(*given)
        output = getattr(args, "output", None)
        if output is not None and not os.path.isdir(os.path.dirname(os.path.realpath(output))):
            raise InputError(_unwritable(output, "No such file or directory"))
        return args

    def error(self, message):
        sys.exit(fail(self.prog, f"{message}; see {self.prog} --help"))


def run(main):
    """Call `main(argv)` and exit: what the user did wrong is one line on standard error and status 2."""
    program = os.path.basename(sys.argv[0])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no failure
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InputError, OverflowError, MemoryError) as error:
        sys.exit(fail(program, error or "not enough memory for this run; make it smaller"))
    except OSError as error:
        sys.exit(fail(program, f"{error.filename or 'output'}: {error.strerror}; check the path and its permissions"))
    except KeyboardInterrupt:
        sys.exit(130)


def fail(program, message):
    """Print one line of explanation, and return the exit status to use."""
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


def write(text, path=None):
    """Print `text`, or write it to a file that is complete or not there."""
    if path is None:
        print(text)
        return
    path = os.path.realpath(path)  # what a link points to, not the link
    in_place = os.path.exists(path) and not os.path.isfile(path)  # a pipe or a device
    partial = path if in_place else f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        if not in_place:
            os.replace(partial, path)
    except OSError as error:
        if not in_place and os.path.exists(partial):
            os.remove(partial)
        raise InputError(_unwritable(path, error.strerror)) from None


def _unwritable(path, reason):
    return f"--output {path}: cannot be written ({reason}); give a path in a folder that exists"


def csv_text(header, rows):
    """Rows of values as CSV, without a line break at its end."""
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue().rstrip("\n")


def table(rows, headers=()):
    """Rows as aligned text: the first column to the left, the others to the right."""
    from tabulate import tabulate  # slow to import, and only tables need it

    width = max(len(row) for row in rows)
    align = ("left",) + ("right",) * (width - 1)
    return tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align)


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(value, unit):
    """A number with the unit that keeps it between 1 and 1000, powers of 1000: 14.22 GB; None is a dash."""
    if value is None:
        return "-"
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:,} {unit}" if isinstance(value, int) else f"{value:.2f} {unit}"


def seconds(value):
    """A time in the unit that suits it: 14.25 ms; None is a dash."""
    if value is None:
        return "-"
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value / 1e-9:.2f} ns"


def rate(value):
    """Tokens per second; None is a dash."""
    return "-" if value is None else f"{value:.2f}"


class Progress:
    """A line on standard error that counts up, if that is a terminal."""

    def __init__(self, label, total):
        self.label, self.total, self.done, self.shown = label, total, 0, sys.stderr.isatty()

    def __call__(self, *_):
        self.done += 1
        if self.shown:
            end = "\n" if self.done == self.total else ""
            print(f"\r{self.label} {self.done}/{self.total}", end=end, file=sys.stderr, flush=True)

    def end(self):
        """End the line of what stopped before its time."""
        if self.shown and 0 < self.done < self.total:
            print(file=sys.stderr)


def available_memory_bytes():
    """Bytes of memory that a new program can use, or None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
