"""What every command shares: errors of one sentence, exit codes, atomic writes."""

import errno
import glob
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Bad input or configuration, told in one sentence: what, where, what was expected, the remedy."""


@contextmanager
def command() -> Iterator[None]:
    """Turn an `InputError` into its sentence on standard error and exit code 2, a warning into one without source."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: the disk is full{where}; what is complete is kept: make room and start again", file=sys.stderr)
        raise SystemExit(2) from None


def first_line(error: Exception) -> str:
    """The first line of a library's message, for use inside one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: Exception) -> bool:
    """Whether that is what an error of Python, torch or CUDA tells."""
    told = re.search("out of memory|can't allocate memory|not enough memory", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and told is not None)


def check_counts(prefix: str, least: int = 1, **counts: int | None) -> None:
    """Refuse counts below `least`; None stands for a default.

    Raises:
        InputError: the first that is too small, named with its prefix.
    """
    for name, value in counts.items():
        if value is not None and value < least:
            raise InputError(f"{prefix}{name} is {value}; it must be at least {least}")


def check_folder(name: str, path: str | Path) -> None:
    """Refuse a file where a folder is to be written, before the work starts."""
    if Path(path).is_file():
        raise InputError(f"{name} {path} is a file; name a folder")


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
    replaceable = any((path / name).is_file() for name in ("config.json", "adapter_config.json", "meta.pt"))
    if path.is_dir() and not replaceable:
        raise InputError(f"{path} is a folder and will not be overwritten; name another place to write to")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: its folder cannot be made ({error.strerror})") from error
    sweep(path.parent, glob.escape(path.name))
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
        if end in ("tmp", "old") and number.isdigit():
            try:
                os.kill(int(number), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            except PermissionError:
                pass  # it is there


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
    if hub and not path.exists():
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
            if not isinstance(row.get(key), types) and (key in required or row.get(key) is not None):
                names = " or ".join(kind.__name__ for kind in types)
                found = f"{type(row[key]).__name__}" if key in row else "nothing"
                raise InputError(f"{source}, {kind} {number}: key {key!r} must hold {names}, found {found}")
        rows.append(row)
    if not rows:
        raise InputError(f"{source} holds no {kind}")
    return rows


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 within a string
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read as JSON lines ({reason}); name a file of one object a line") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is JSON, but no text
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: no JSON ({error})") from error
        yield number, row


def _parquet_rows(path: Path) -> list[dict]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} is no readable Parquet file ({first_line(error)})") from error


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
        found = [entry] if Path(entry).is_file() else sorted(glob.glob(entry)) if glob.has_magic(entry) else []
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
