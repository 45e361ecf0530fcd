"""One-sentence errors, exit codes, argument parsing, atomic writes: what every command shares."""

import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import jsonargparse

LARGEST = (
    1e6  # of rewards, baselines and log-probs in any input: sums of them are squared in float32
)
LOCKS: list[IO] = []  # open files, see `lock`


class InputError(ValueError):
    """Bad input or configuration, explained in one sentence: what, where, what was expected, the remedy."""


class DivergedError(InputError):
    """Training has produced numbers that are NaN or infinite."""


class OneSentenceErrors:
    """Mixin for a jsonargparse parser: its errors are `InputError`s, and arguments cannot be abbreviated."""

    hint = " (--help lists every argument)"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sentence = re.sub(r"\s+", " ", str(message)).replace(self.hint, "")
        for library_words in (
            r"Does not validate against any of .*? Errors: - (.*?) - .*",
            r"Type typing.Callable\[.*?\] expects a function or a callable class:()",
            r"- Expected a path but .*? - ()",
            r"Parser key ()",
            r"<class '(\w+)'>",
        ):
            sentence = re.sub(library_words, r"\1", sentence)
        raise InputError(sentence.strip() + self.hint) from ex

    def parse_path(self, path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_path(path, *args, **kwargs)  # type: ignore[misc]
        except (InputError, UnicodeDecodeError) as error:  # neither names the file
            raise InputError(f"{path}: {error}") from error


class ArgumentParser(OneSentenceErrors, jsonargparse.ArgumentParser):
    """The parser of every command but `train.py`; options may be given with dashes for underscores."""

    def add_argument(self, *args, **kwargs) -> Any:
        action = super().add_argument(*args, **kwargs)
        self._option_string_actions |= {
            name.replace("_", "-"): action for name in action.option_strings
        }
        return action


@contextmanager
def command() -> Iterator[None]:
    """Print bad input and a full disk as one sentence, with exit code 2; print warnings without their source."""
    start = "\r\x1b[K" * sys.stderr.isatty()  # of a line, in place of a progress bar
    warnings.formatwarning = lambda message, *_: f"{start}warning: {message}\n"  # type: ignore[assignment]
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        yield
    except (InputError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            message = f"the disk is full ({error.filename}); complete files are kept: make room and start again"
        print(
            f"{start}error: {printable(message, limit=450)}", file=sys.stderr
        )  # it may quote the input
        raise SystemExit(2) from None


def printable(text: str, limit: int, kept: str = "") -> str:
    """Text without control characters, except those in `kept`, shortened in its middle to `limit` characters."""
    text = "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
    cut = len(text) - limit
    return (
        f"{text[: limit // 2]} [… {cut:,} characters …] {text[-limit // 2 :]}" if cut > 0 else text
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second if the first ends in a colon. If a library has wrapped an
    `InputError`, or the error of a missing package, that of the wrapped one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (InputError, ModuleNotFoundError)):
        cause = cause.__cause__ or cause.__context__
    lines = (str(cause or error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


@contextmanager
def explained(what: str, errors: Any = Exception, remedy: str = "") -> Iterator[None]:
    """Turn a library's errors, by default whatever a broken file makes it raise, into an `InputError`: what is wrong,
    the `first_line` of the error, the remedy."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{what} ({first_line(error)}){remedy and '; '}{remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or CUDA ran out of memory."""
    found = re.search(
        "out of memory|can't allocate memory|not enough memory", str(error), re.IGNORECASE
    )
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and found is not None)


def check_folder(name: str, path: str | Path) -> None:
    """Raise an InputError if no folder can be written at `path`, before any work starts."""
    there = next(place for place in (Path(path), *Path(path).absolute().parents) if place.exists())
    with explained(
        f"{name} {path} cannot be written: {there} takes no file", OSError, "name another place"
    ):
        tempfile.TemporaryFile(dir=there).close()


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, a file or a folder to write; rename it to `path` when the block succeeds. A
    block that fails, or a process that is killed inside it, leaves `path` as it was. Of folders only a policy's, an
    adapter's or a sharded checkpoint's is replaced."""
    path = Path(path)
    temporary, aside = (
        path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old")
    )
    replaceable = any(
        (path / name).is_file() for name in ("config.json", "adapter_config.json", "meta.pt")
    )
    if path.is_dir() and not replaceable:
        raise InputError(
            f"{path} is a folder and will not be overwritten; name another place to write to"
        )
    check_folder("the file", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    try:
        yield temporary
        for file in [
            temporary,
            *temporary.rglob("*"),
        ]:  # on the disk before the rename, or a power cut could empty it
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if replaceable:  # a folder cannot be renamed over a folder that holds files
            os.replace(path, aside)
        os.replace(temporary, path)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        remove(temporary)


def lock(folder: str | Path) -> None:
    """Keep other processes out of a folder until this one ends, however it ends. Raises an InputError if another one,
    perhaps on another node, is writing there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder) / ".lock", "a")  # noqa: SIM115 - closing it would end the lock
    LOCKS.append(file)
    try:
        fcntl.lockf(
            file, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # unlike flock's, not inherited by loader processes
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # otherwise the file system has no locks
            message = f"another process is writing to {folder}"
            raise InputError(f"{message}; wait for it, end it, or name another place") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    for path in folder.glob(".*.*.*"):
        *_, process, end = path.name.split(".")
        if end in ("tmp", "old") and process.isdigit() and not _is_running(int(process)):
            remove(path)


def _is_running(process: int) -> bool:
    """Whether another process has this id; in a container, this process often has the id of the one before."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it exists, and belongs to another user
    return process != os.getpid()
