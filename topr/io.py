"""What every command shares: errors of one sentence, exit codes, atomic writes."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Bad input or configuration, told in one sentence: what, where, what was expected, the remedy."""


@contextmanager
def command() -> Iterator[None]:
    """Turn an `InputError` into its sentence on standard error and exit code 2."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, a file or a folder to write; rename it to `path` when the block succeeds.

    A block that fails leaves nothing behind; a process killed inside leaves `path` as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if path.is_dir():  # a folder cannot be renamed over a folder that holds files
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
