"""What every command shares: errors of one sentence, exit codes, atomic writes."""

import argparse
import errno
import glob
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

LONGEST_SENTENCE = 450  # characters of a message, which may quote the input


class InputError(ValueError):
    """Bad input or configuration, told in one sentence: what, where, what was expected, the remedy."""


class DivergedError(InputError):
    """Training has come to numbers that are NaN or infinite."""


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
