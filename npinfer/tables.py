"""TOML data files of many named tables, of which a program mostly needs one.

A full parse of a hundred tables costs more than a whole shape-only run, so the
text is cut at its `[name]` lines and only the table asked for is parsed.  The
files hold flat tables (inline tables and arrays, no `[name.sub]`), which makes
the cut exact; a test holds it to a full parse.
"""

import re
from functools import cache

from npinfer.errors import UnknownName

_HEADER = re.compile(r'^\[(?:"([^"\n]+)"|([A-Za-z0-9_-]+))\]\s*$', re.MULTILINE)


@cache
def _sections(path):
    """Text of each table by name, in file order."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    return {header[1] or header[2]: text[header.end():end] for header, end in zip(headers, ends)}


def table_names(path):
    """Names of the tables in the TOML file at `path` in file order."""
    return list(_sections(path))


def read_table(path, name, kind):
    """The table called `name` of the TOML file at `path`, as a dict.

    Parameters
    ----------
    path : str
    name : str
    kind : str
        What the tables are, for the error message: "model", "GPU".

    Raises
    ------
    UnknownName
        If there is no such table; the message lists those there are.
    """
    sections = _sections(path)
    if name not in sections:
        raise UnknownName(kind, name, sections)
    import tomllib  # 10 ms that a program without data files need not wait

    return tomllib.loads(sections[name])
