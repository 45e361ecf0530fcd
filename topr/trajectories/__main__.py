"""The command `python -m topr.trajectories`: import, inspect, curate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt

from topr.commands import ArgumentParser, command, printable
from topr.io import InputError, check_folder
from topr.trajectories.curate import Curation, curate, figures, reward_and_group
from topr.trajectories.file import (
    METADATA_KEYS,
    SCHEMA,
    batches,
    expand_globs,
    read_metadata,
    resolve_files,
)
from topr.trajectories.importing import import_files
from topr.trajectories.rows import EXPECTED


def report(files: list[str]) -> str:
    """Statistics of trajectory files, read as one set. Raises an InputError for a bad one."""
    import pandas as pd

    facts: dict[str, Any] = {}
    metadata = [read_metadata(file) for file in files]
    for key in METADATA_KEYS:  # each value once
        facts[key] = " | ".join(dict.fromkeys(str(entry[key]) for entry in metadata))
    facts |= figures(*reward_and_group(files))
    lines = [f"{name:<14} {value}" for name, value in facts.items()]
    rows = pd.concat(statistics(table) for file in files for table in batches(file))
    table = rows.describe(percentiles=[0.5, 0.95]).T  # a row of statistics for each column
    return "\n".join([*lines, "", table.to_string(float_format="{:,.4g}".format)])


def statistics(table: pa.Table) -> Any:
    """A data frame with a row for each trajectory; `valid` is NaN where not graded."""
    rows = table.select(["reward", "finished", "valid"]).to_pandas().astype(float)
    rows["prompt_tokens"] = pc.list_value_length(table["prompt_ids"]).to_numpy()
    rows["response_tokens"] = pc.list_value_length(table["response_ids"]).to_numpy()
    rows["log_mu"] = [log_probs.sum() for log_probs in table["ref_logprobs"].to_numpy()]
    return rows


def samples(files: list[str], count: int) -> Iterator[str]:
    """The first `count` positives and others of trajectory files, as text."""
    import pyarrow.dataset as ds

    trajectories = ds.dataset(files, schema=SCHEMA)
    reward = pc.field("reward")
    for chosen in (reward > 0, reward <= 0):
        for row in trajectories.head(count, filter=chosen).to_pylist():
            facts = [f"{key} {row[key]}" for key in ("reward", "finished", "answer", "gold")]
            text = f"--- {', '.join(facts)}\n[prompt]\n{row['prompt']}\n[response]\n"
            yield printable(text, 1000) + printable(row["response"], 1000)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m topr.trajectories", description="Make, inspect, select trajectory files."
    )
    commands = parser.add_subcommands()
    converter = ArgumentParser(description="Tokenise responses with rewards, and score log mu.")
    converter.add_argument("files", nargs="+", type=str, help=f"{EXPECTED}; globs are expanded")
    converter.add_function_arguments(import_files, as_group=False, skip={"files"})
    commands.add_subcommand("import", converter)

    trajectory_files = "trajectory files, read as one set; globs are expanded"
    inspector = ArgumentParser(description="Report on trajectory files and show samples.")
    inspector.add_argument("files", nargs="+", type=str, help=trajectory_files)
    inspector.add_argument("--samples", type=NonNegativeInt, default=1, help="samples of each sign")
    commands.add_subcommand("inspect", inspector)

    selector = ArgumentParser(description="Select the trajectories to train on.")
    selector.add_class_arguments(Curation, as_group=False, as_positional=True)
    selector.add_argument("files", nargs="+", type=str, help=trajectory_files)
    selector.add_function_arguments(curate, as_group=False, skip={"files", "curation"})
    commands.add_subcommand("curate", selector)
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
        resolve = expand_globs if name == "import" else resolve_files
        files = options["files"] = resolve(options["files"], name)
        if name == "inspect":
            print(report(files), *samples(files, options["samples"]), sep="\n\n")
            return
        out = options["out"]
        check_out(out, files)
        if name == "import":
            too_long = import_files(**options)
            print(f"{report([out])}\nleft out as too long: {too_long}")
        else:
            given = {key: options.pop(key) for key in ("files", "out", "iteration")}
            done = curate(**given, curation=Curation(**options))
            for fact, before in done["before"].items():
                print(f"{fact:<14} {before} -> {done['after'][fact]}")


if __name__ == "__main__":
    main()
