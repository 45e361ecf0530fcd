"""Load and validate rows that users supply: JSON lines, Parquet, hub data sets."""

import glob
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topr.io import InputError, check_file, first_line

REMEDY = "train.py predict samples trajectory files, python -m topr.trajectories import converts text"
Types = dict[str, tuple[type, ...]]  # the accepted types of each key


def load_rows(source: str | Path, required: Types, optional: Types | None = None) -> list[dict[str, Any]]:
    """Rows of a JSON-lines or Parquet file, or of a hub data set written `owner/name[/config]:split`.

    Optional keys may be absent or null. Raises InputError for a row that lacks a key or holds another type.
    """
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?:(\w+(?:\[.*\])?)", str(source))
    try:
        if hub and not os.path.exists(source):
            import datasets

            rows = datasets.load_dataset(hub[1], hub[2], split=hub[3]).to_list()
        elif Path(source).suffix == ".parquet":
            rows = pq.read_table(source, page_checksum_verification=True).to_pylist()
        else:
            lines = Path(source).read_text(encoding="utf-8-sig").split("\n")  # a string may hold U+2028
            rows = json.loads("[" + ",\n".join(line for line in lines if line.strip()) + "]")
    except Exception as error:  # whatever a library raises for a network, a name or a damaged file
        expected = "JSON lines in UTF-8, Parquet, or a hub data set owner/name[/config]:split"
        raise InputError(f"{source} cannot be read ({first_line(error)}); give {expected}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{source}, row {number}: expected a JSON object, found {type(row).__name__}")
        for key, types in (required | (optional or {})).items():
            if type(row.get(key)) not in types and (key in required or row.get(key) is not None):
                expected = " or ".join(accepted.__name__ for accepted in types)
                raise InputError(f"{source}, row {number}: key {key!r} holds {row.get(key)!r:.40}, expected {expected}")
    if not rows:
        raise InputError(f"{source} holds no row")
    return rows


@contextmanager
def open_parquet(path: str | Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file, not buffered ahead, checksums verified; raises InputError if pyarrow rejects it or its rows."""
    check_file(path, REMEDY)
    try:
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            yield file
    except InputError:
        raise
    except (OSError, ValueError, KeyError, OverflowError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}; {REMEDY}") from error


def resolve_files(train: str | list[str], key: str = "data.train") -> list[str]:
    """Parquet files of a path, a glob, a hub data set or a list of these entries, which errors call `key`."""
    files: list[str] = []
    for entry in [train] if isinstance(train, str) else train:
        found = [entry] if os.path.isfile(entry) else sorted(glob.glob(entry))
        if not found and re.fullmatch(r"[\w.-]+/[\w-]+", entry):
            from huggingface_hub import snapshot_download

            with suppress(OSError, ValueError):  # reported below
                folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
                found = sorted(map(str, Path(folder).rglob("*.parquet")))
        if not found:
            raise InputError(f"{key}: {entry!r} is no file, glob or hub data set that can be read; {REMEDY}")
        files += found
    if len(set(files)) < len(files):
        raise InputError(f"{key} names {max(files, key=files.count)} twice; give every file once")
    return files
