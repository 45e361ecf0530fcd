"""What every command shares: arguments, one-sentence errors, exit codes."""

import errno
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jsonargparse

from topr.io import InputError, first_line

# of Python, torch and CUDA
OUT_OF_MEMORY = r"(?i)(out of|allocate|enough) memory|MemoryError"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OneSentenceErrors:
    """Mixin for a jsonargparse parser: raises `InputError`, takes no abbreviated arguments."""

    hint = " (--help lists every argument)"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)  # type: ignore[call-arg]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sentence = " ".join(str(message).replace(self.hint, "").split())
        # jsonargparse lists every type that it tried; the first says enough
        sentence = re.sub(r"- Expected a path but .*? - ", "", sentence)
        sentence = re.sub(r"<class '(\w+)'>", r"\1", sentence)
        sentence = re.sub(r"Does not validate .*? Errors: - (.*?) - .*", r"\1", sentence)
        raise InputError(sentence + self.hint) from ex


class ArgumentParser(OneSentenceErrors, jsonargparse.ArgumentParser):
    """The parser of every command but `train.py`."""


@contextmanager
def command() -> Iterator[None]:
    """Print bad input and a full disk as one sentence, with exit code 2; print warnings without
    their source."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(143) from None
    except InputError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        message = f"the disk is full ({error.filename}): make room and start again"
    except (RuntimeError, MemoryError) as error:
        if not re.search(OUT_OF_MEMORY, repr(error)):
            raise
        message = (
            f"out of memory ({first_line(error)}); lower microbatch_tokens or the sampler's rows, "
            "shard or take a smaller policy"
        )
    else:
        return
    sentence = printable(" ".join(message.split()), 600)  # it may quote the input
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def printable(text: str, limit: int) -> str:
    """Text for a terminal: control characters but tabs and line ends escaped, cut at `limit`."""
    shown = [c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text[:limit]]
    return "".join(shown) + "…" * (len(text) > limit)
