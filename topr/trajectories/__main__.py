"""The command `python -m topr.trajectories`: import, inspect, curate."""

from collections.abc import Callable

import numpy as np

from topr.io import InputError
from topr.io.commands import ArgumentParser, command, printable
from topr.trajectories.curate import Way, curate, read_files
from topr.trajectories.fields import FIELDS
from topr.trajectories.file import expand_globs
from topr.trajectories.importing import import_files


def inspect(files: list[str]):
    """Print what files have in common, statistics of their trajectories, and the first two.

    Args:
        files: trajectory files, read as one set
    """
    table, metadata = read_files(files)
    for key, value in metadata.items():
        print(f"{key:<10} {value}")
    rows = table.drop_columns(["prompt", "response", "sampled"]).to_pandas()
    rows["prompt_tokens"] = rows.pop("prompt_ids").map(len)
    rows["response_tokens"] = rows.pop("response_ids").map(len)
    rows["log_mu"] = rows.pop("ref_logprobs").map(np.sum)
    print(rows.describe(include="all").T.to_string(float_format="{:,.4g}".format, na_rep=""))
    for row in table.slice(0, 2).to_pylist():
        print(f"\n--- reward {row['reward']:.4g}, answer {row['answer']}, gold {row['gold']}")
        for key in ("prompt", "response"):
            print(f"[{key}]\n{printable(row[key], 1000)}")


COMMANDS: dict[str, Callable] = {"import": import_files, "inspect": inspect, "curate": curate}


def main():
    parser = ArgumentParser(prog="python -m topr.trajectories")
    commands = parser.add_subcommands()
    for name, function in COMMANDS.items():
        subparser = ArgumentParser()
        if name == "import":
            subparser.add_argument("--config", action="config", help="options, see configs/import/")
            subparser.add_argument(
                "--scale", nargs=2, type=float, help="rewards to be -1 and +1, without threshold"
            )
            for field, expression in FIELDS.items():
                subparser.add_argument(f"--{field}", default=expression, help="keys of a row")
        if name == "curate":
            subparser.add_argument("way", type=Way)
        subparser.add_argument("files", nargs="+", help="files; globs are expanded")
        subparser.add_function_arguments(function, skip={"way", "files", "scale"})
        commands.add_subcommand(name, subparser)
    with command():
        args = parser.parse_args()
        options = args[args.subcommand].as_dict()
        options["files"] = expand_globs(options["files"])
        if options.get("out") in options["files"]:  # perhaps by an earlier command
            raise InputError(f"--out {options['out']} is one of the files that are read")
        options.pop("config", None)
        COMMANDS[args.subcommand](**options)


if __name__ == "__main__":
    main()
