"""Errors for users, files that are complete or absent; beside them arguments, settings, ranks."""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LARGEST = 1e6  # reward or stored log-prob: sums of them are squared in float32
StrPath = str | Path
LOCKS: list[IO] = []  # open files; closing one ends its lock


class InputError(ValueError):
    """Bad input or configuration. The message is one sentence: what, where, expected; remedy."""

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(f"{what}; {remedy}" if remedy else what)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second if the first ends in a colon.

    If a library has wrapped an `InputError`, that one's.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, InputError):
        cause = cause.__cause__ or cause.__context__
    found = re.match(r"(.*:\s*\n)?.*", str(cause or error).strip())
    return " ".join(found[0].split()) if found and found[0] else type(error).__name__


@contextmanager
def explained(what: str, errors=Exception, remedy: str = "") -> Iterator[None]:
    """Turn a library's errors into an `InputError`: what is wrong, the first line, the remedy.

    By default any error, because a broken file makes libraries raise anything.
    """
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{what} ({first_line(error)})", remedy) from error


def check_folder(name: str, path: StrPath):
    """Raise an InputError if the folder `path` cannot be created or written, before work starts."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    with explained(
        f"{name} {path} cannot be written: {existing} takes no file", OSError, "name another place"
    ):
        tempfile.TemporaryFile(dir=existing).close()


def check_absent(path: StrPath, overwrite: bool):
    """Raise an InputError if a file exists and may not be replaced, or cannot be written, before
    work starts."""
    check_folder("--out: the folder", Path(path).parent)
    if Path(path).exists() and not overwrite:
        raise InputError(f"--out {path} exists", "name another, or add --overwrite true")


def claim(out: Path, arguments, overwrite=False):
    """Lock a folder, and write to it what its results are of: `results.*`, if there are any yet. An
    InputError if they are of other arguments."""
    path = out / "arguments.json"
    text = json.dumps(arguments)
    check_folder("--out", out)
    lock(out)
    same = path.exists() and path.read_text() == text
    if not same and any(out.glob("results.*")) and not overwrite:
        raise InputError(
            f"{out} holds results of other arguments or policies (see {path})",
            "name another --out, or remove its results.* (evaluate.py: --overwrite true)",
        )
    write_text(path, text)


@contextmanager
def atomic(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path to write a file or folder to; rename it to `path` at the end.

    If the block fails or the process is killed in it, `path` stays as it was. Of folders, only a
    policy, an adapter or a sharded checkpoint is replaced; any other raises an InputError.
    """
    path = Path(path)
    names = {file.name for file in path.glob("*")}
    if path.is_dir() and not names & {"config.json", "adapter_config.json", "meta.pt"}:
        raise InputError(f"{path} is a folder and will not be overwritten; name another place")
    folder = path.with_name(f".{path.name}.tmp")
    remove(folder)  # a killed process left it
    folder.mkdir(parents=True)
    temporary = folder / path.name
    try:
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)  # before the rename, or a power cut could leave an empty file
            os.close(descriptor)
        if path.is_dir():  # a folder cannot be renamed over a folder that holds files
            os.replace(path, folder / "replaced")
        os.replace(temporary, path)
    finally:
        remove(folder)


def lock(folder: StrPath) -> IO:
    """Keep other processes out of a folder until this one ends, or closes the file that is
    returned; remove the temporary files that killed ones left in it.

    Raises an InputError if another process, perhaps on another node, is writing there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")  # noqa: SIM115
    LOCKS.append(file)
    try:
        # lockf and not flock, whose locks the workers of a loader would inherit
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another process is writing to {folder}", "wait for it, end it, or name another place"
        ) from error
    except OSError:  # this file system has no locks
        pass
    for left in folder.rglob(".*.tmp"):
        remove(left)
    return file


def write_text(path: StrPath, text: str):
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove(path: Path):
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
