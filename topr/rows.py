"""Rows of files that people bring: JSON lines, Parquet, hub data sets, read with care."""

import glob
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from topr.io import InputError, check_file, first_line

LONGEST_LINE = 2**25  # characters of a line of JSON


def load_rows(
    source: str | Path, required: dict[str, tuple[type, ...]], optional: dict[str, tuple[type, ...]] | None = None
) -> list[dict[str, Any]]:
    """Rows of a JSON-lines or Parquet file, or of a hub data set written `owner/name[/config]:split`.

    Args:
        source: the file or the data set; a split may be a slice, `openai/gsm8k/main:train[:100]`.
        required: keys that every row holds, with the types of their values.
        optional: keys that may be absent or null.

    Raises:
        InputError: it cannot be read, or a row is not that, named by its number.
    """
    path, hub = Path(source), re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?:(\w+(?:\[.*\])?)", str(source))
    if hub and not os.path.exists(path):
        numbered, kind = enumerate(_hub_rows(str(source), *hub.groups()), start=1), "row"
    elif path.suffix == ".parquet":
        numbered, kind = enumerate(_parquet_rows(path), start=1), "row"
    else:
        numbered, kind = _json_rows(path), "line"
    rows = []
    for number, row in numbered:
        if not isinstance(row, dict):
            raise InputError(f"{source}, {kind} {number}: expected a JSON object, found {type(row).__name__}")
        for key, types in {**required, **(optional or {})}.items():
            if type(row.get(key)) not in types and (key in required or row.get(key) is not None):
                names = " or ".join(kind.__name__ for kind in types)
                found = f"{type(row[key]).__name__}" if key in row else "nothing"
                raise InputError(f"{source}, {kind} {number}: key {key!r} must hold {names}, found {found}")
        rows.append(row)
    if not rows:
        raise InputError(f"{source} holds no {kind}")
    return rows


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    check_file(path, "name a file of one JSON object a line")
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:  # U+2028 may stand within a string
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    raise InputError(f"{path}, line {number} is longer than {LONGEST_LINE} characters; shorten it")
                if line.strip():
                    yield number, load_json(line)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file of one JSON object a line") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} cannot be read as JSON lines: it is no UTF-8 ({error.reason}); encode it so"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}, line {number}: no JSON ({error}); write one JSON object a line") from error


def load_json(text: str) -> Any:
    """The value of a JSON text, without what Python alone takes: NaN, keys that stand twice, halves of characters.

    Raises:
        ValueError: it is none.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(
                f"the key {max((key for key, _ in pairs), key=[k for k, _ in pairs].count)!r} stands twice"
            )
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=distinct)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


@contextmanager
def open_parquet(path: str | Path, remedy: str = "name another file") -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile` whose pages must have the checksums that they were written with, if any.

    Raises:
        InputError: it cannot be read, here or in the block.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_file(path, remedy)
    try:
        # buffering ahead would hold the whole file
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            yield file
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise InputError(f"{path} is no readable Parquet file ({first_line(error)}); {remedy}") from error


def _parquet_rows(path: Path) -> list[dict]:
    with open_parquet(path) as file:
        return file.read().to_pylist()


def _hub_rows(source: str, name: str, config: str | None, split: str) -> list[dict]:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, config, split=split).to_list()
    except Exception as error:  # whatever the library makes of a network, a name or a split
        raise InputError(
            f"{source} is no file, and the hub does not deliver it as owner/name[/config]:split ({first_line(error)}); "
            "name a local file instead"
        ) from error


def resolve_files(train: str | list[str], key: str = "data.train") -> list[str]:
    """Parquet files from a path, a glob, a hub data set's name, or a list of them, sorted within each entry.

    Args:
        train: the entries.
        key: names them in messages.

    Raises:
        InputError: an entry names no file.
    """
    files: list[str] = []
    for entry in [train] if isinstance(train, str) else train:
        found = [entry] if os.path.isfile(entry) else sorted(glob.glob(entry)) if glob.has_magic(entry) else []
        if not found and entry.count("/") == 1 and not Path(entry).suffix and not glob.has_magic(entry):
            from huggingface_hub import snapshot_download

            try:
                folder = snapshot_download(entry, repo_type="dataset", allow_patterns="*.parquet")
                found = sorted(map(str, Path(folder).rglob("*.parquet")))
            except (OSError, ValueError):
                found = []  # told below, like any other name that leads nowhere
        if not found:
            raise InputError(
                f"{key}: {entry!r} is no file, glob or hub data set that can be read; give trajectory Parquet "
                "files (train.py predict samples them, python -m topr.trajectories import converts text)"
            )
        files += found
    if len(set(files)) < len(files):
        raise InputError(f"{key} names {max(files, key=files.count)} twice; give every file once")
    return files
