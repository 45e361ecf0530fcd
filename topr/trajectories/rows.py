"""Load and check the rows of users' files: JSON lines, Parquet, data sets of the hub."""

import glob
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr.io import InputError, explained
from topr.trajectories.file import refuse_twice

Row = dict[str, Any]
Types = dict[str, tuple[type, ...]]  # the accepted types of each key
EXPECTED = "JSON lines (.gz, .zst), Parquet or a hub data set owner/name[/config]:split"
HUB = r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?:(\w+(?:\[.*\])?)"  # name, configuration, split


def resolve_sources(entries: list[str], key: str) -> list[str]:
    """Sources for `load_rows`, with globs expanded; `key` names the argument in errors."""
    sources: list[str] = []
    for entry in entries:
        found = [] if os.path.exists(entry) else sorted(glob.glob(entry))
        sources += found or [entry]
    refuse_twice(sources, key)
    return sources


def load_rows(source: str | Path, required: Types, optional: Types) -> list[Row]:
    """Rows of a file or a hub data set, with checked types.

    Args:
        source: JSON lines (also .gz and .zst), Parquet, or `owner/name[/config]:split` on the hub.
        required: types of the keys that every row must have.
        optional: types of keys that may be absent or null.

    Raises:
        InputError: if the source cannot be read or is empty, or a key is absent or mistyped.
    """
    with explained(f"{source} cannot be read", remedy=f"give {EXPECTED}"):
        rows = _read(source)
    if not rows:
        raise InputError(f"{source} holds no row")
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected a JSON object, found {type(row).__name__}")
        for key, types in (required | optional).items():
            value = row.get(key)
            if value is None and key in optional:
                continue
            if type(value) not in types:  # isinstance would take a boolean for an int
                names = " or ".join(accepted.__name__ for accepted in types)
                raise InputError(f"{where}: key {key!r} holds {value!r:.40}, expected {names}")
    return rows


def _read(source: str | Path) -> list[Row]:
    hub = re.fullmatch(HUB, str(source))
    path = Path(source)
    if hub and not path.exists():
        import datasets

        return datasets.load_dataset(hub[1], hub[2], split=hub[3]).to_list()
    if path.suffix == ".parquet":
        return pq.read_table(path, page_checksum_verification=True).to_pylist()
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    stream = pa.input_stream(pa.py_buffer(path.read_bytes()), compression)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig").read()
    lines = text.split("\n")  # not splitlines: a string may hold U+2028
    return json.loads("[" + ",\n".join(line for line in lines if line.strip()) + "]")
