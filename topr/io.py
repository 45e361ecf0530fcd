"""What every command shares: errors of one sentence, exit codes, atomic writes."""

import argparse
import errno
import glob
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

LONGEST_SENTENCE = 450  # characters of a message, which may quote the input
LONGEST_LINE = 2**25  # characters of a line of JSON


class InputError(ValueError):
    """Bad input or configuration, told in one sentence: what, where, what was expected, the remedy."""


class ArgumentParser(argparse.ArgumentParser):
    """One whose errors are an `InputError`, and which takes no argument by its first letters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists every argument)")


@contextmanager
def command() -> Iterator[None]:
    """Turn an `InputError` into its sentence on standard error and exit code 2, a warning into one without source."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        yield
    except InputError as error:
        print(f"error: {printable(str(error), LONGEST_SENTENCE)}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: the disk is full{where}; what is complete is kept: make room and start again", file=sys.stderr)
        raise SystemExit(2) from None


def printable(text: str, limit: int, kept: str = "") -> str:
    """Text without what would break a line or steer a terminal, but for the characters `kept`, cut in its middle."""
    text = "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
    cut = len(text) - limit
    return f"{text[: limit // 2]} [… {cut:,} characters …] {text[-limit // 2 :]}" if cut > 0 else text


def first_line(error: Exception) -> str:
    """The first line of a library's message, for use inside one of ours, and the second where it is a heading."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


def is_out_of_memory(error: Exception) -> bool:
    """Whether that is what an error of Python, torch or CUDA tells."""
    told = re.search("out of memory|can't allocate memory|not enough memory", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and told is not None)


def check_counts(prefix: str, least: int = 1, most: int = 2**31 - 1, **counts: int | None) -> None:
    """Refuse counts outside of `least` to `most`; None stands for a default.

    Raises:
        InputError: the first that is, named with its prefix.
    """
    for name, value in counts.items():
        if value is not None and not least <= value <= most:
            bound = f"least {least}" if value < least else f"most {most}"
            raise InputError(f"{prefix}{name} is {value}; it must be at {bound}")


def check_file(path: str | Path, remedy: str = "name a file") -> None:
    """Refuse whatever is no regular file, before it is read: a pipe would wait, a device never end.

    Raises:
        InputError: it is none.
    """
    if not os.path.isfile(path):  # of names that no file can have, Path.is_file raises
        found = "is no regular file" if os.path.lexists(path) else "does not exist"
        raise InputError(f"{path} cannot be read: it {found}; {remedy}")


def check_folder(name: str, path: str | Path) -> None:
    """Refuse a place where no folder can be written, before the work starts."""
    there = next(place for place in (Path(path), *Path(path).absolute().parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise InputError(
            f"{name} {path} cannot be written: {there} takes no file ({error.strerror}); name another place"
        ) from error


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, a file or a folder to write; rename it to `path` when the block succeeds.

    A block that fails, or a process killed inside, leaves `path` as it was.

    Raises:
        InputError: a folder stands at `path`, unless it is a model's, which a new model replaces.
    """
    path = Path(path)
    temporary, aside = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    # a policy, adapters, a sharded checkpoint
    replaceable = any(os.path.isfile(path / name) for name in ("config.json", "adapter_config.json", "meta.pt"))
    if os.path.isdir(path) and not replaceable:
        raise InputError(f"{path} is a folder and will not be overwritten; name another place to write to")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, glob.escape(path.name))
        temporary.touch()
        temporary.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be written ({reason}); name another place") from error
    try:
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:  # on the disk before it has its name, lest a power cut empty it
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if replaceable:  # a folder cannot be renamed over a folder that holds files
            os.replace(path, aside)
        os.replace(temporary, path)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left in a folder of files of this name, a pattern: temporaries without a process."""
    for path in folder.glob(f".{name}.*.*"):
        *_, number, end = path.name.split(".")
        if end in ("tmp", "old") and number.isdigit() and not _runs(int(number)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _runs(number: int) -> bool:
    """Whether another process has this number; in a container, this one often has that of the one before."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return number != os.getpid()


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
