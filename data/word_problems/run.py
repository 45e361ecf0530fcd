"""The study on a real model: make a start, sample, train each loss at its own rate, compare.

python data/word_problems/run.py --policy HuggingFaceTB/SmolLM2-135M-Instruct
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt

from data.claims.reproduce import SETTINGS, reproduce
from topr.io.commands import ArgumentParser, command


def run(
    policy: str = SETTINGS["words"]["base"],
    quick: bool = False,
    out: Path = Path("runs/words"),
    workers: PositiveInt = os.cpu_count() or 1,
):
    """Write table and figure; every step that is complete is kept.

    Args:
        policy: to start from: a hub name, or a folder or GGUF file, relative to the repository
        quick: two losses on a few problems, in minutes: no evidence
        out: folder to write
        workers: commands that run at once, on a core each
    """
    for regime in ("words", "words_quick"):
        SETTINGS[regime]["base"] = policy
    reproduce(regime="words_quick" if quick else "words", out=out, workers=workers)


if __name__ == "__main__":
    with command():
        auto_cli(run, as_positional=False, parser_class=ArgumentParser)
