"""The command `python -m topr.trajectories`: import, inspect, curate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jsonargparse.typing import NonNegativeInt

from topr.commands import ArgumentParser, command, printable
from topr.io import InputError, check_folder
from topr.trajectories.curate import Way, common_metadata, curate
from topr.trajectories.file import batches, expand_globs, resolve_files
from topr.trajectories.importing import import_files
from topr.trajectories.rows import EXPECTED


def inspect(files: list[str], samples: NonNegativeInt = 2) -> None:
    """Print what files have in common, statistics of their trajectories, and the first ones.

    Args:
        files: trajectory files, read as one set
        samples: trajectories to show
    """
    import pandas as pd

    for key, value in common_metadata(files).items():
        print(f"{key:<10} {value}")
    tables = [statistics(table) for file in files for table in batches(file)]
    table = pd.concat(tables).describe(include="all").T
    print(table.to_string(float_format="{:,.4g}".format, na_rep=""))
    first = next(batches(files[0]))
    for row in first.slice(0, samples).to_pylist():
        print(f"\n--- reward {row['reward']}, answer {row['answer']}, gold {row['gold']}")
        print(f"[prompt]\n{printable(row['prompt'], 1000)}")
        print(f"[response]\n{printable(row['response'], 1000)}")


def statistics(table: pa.Table) -> Any:
    """A data frame with a row for each trajectory."""
    rows = table.drop_columns(["prompt", "response", "sampled"]).to_pandas()
    rows["prompt_tokens"] = rows.pop("prompt_ids").map(len)
    rows["response_tokens"] = rows.pop("response_ids").map(len)
    rows["log_mu"] = rows.pop("ref_logprobs").map(np.sum)
    return rows


COMMANDS: dict[str, Callable] = {"import": import_files, "inspect": inspect, "curate": curate}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m topr.trajectories")
    commands = parser.add_subcommands()
    files = f"trajectory files; for import {EXPECTED}; globs are expanded"
    for name, function in COMMANDS.items():
        subparser = ArgumentParser()
        if name == "curate":
            subparser.add_argument("way", type=Way)
        subparser.add_argument("files", nargs="+", type=str, help=files)
        subparser.add_function_arguments(function, skip={"way", "files"})
        commands.add_subcommand(name, subparser)
    return parser


def check_out(out: str, files: list[str]) -> None:
    """Raise an InputError if `out` cannot be written, before any work."""
    if out in files or Path(out).is_dir():
        raise InputError(f"--out {out} is a folder or one of the inputs; name a new Parquet file")
    check_folder("--out: the folder", Path(out).parent)


def main() -> None:
    with command():
        args = make_parser().parse_args()
        name = args.subcommand
        options = args[name].as_dict()
        files = expand_globs(options["files"])
        if name != "import":
            files = resolve_files(files, name)
        options["files"] = files
        if "out" in options:
            check_out(options["out"], files)
        COMMANDS[name](**options)


if __name__ == "__main__":
    main()
