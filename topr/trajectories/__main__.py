"""The command `python -m topr.trajectories`: import, inspect, curate."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt

from topr.io import ArgumentParser, InputError, check_folder, command, printable
from topr.trajectories.curate import Curation, curate
from topr.trajectories.file import METADATA_KEYS, SCHEMA, batches, read_metadata, resolve_files
from topr.trajectories.importing import import_files
from topr.trajectories.rows import EXPECTED, resolve_sources

if TYPE_CHECKING:
    import pandas as pd


def report(files: list[str]) -> str:
    """Statistics of trajectory files, read as one set. Raises an InputError for a bad one."""
    import pandas as pd

    lines = []
    metadata = [read_metadata(file) for file in files]
    for key in METADATA_KEYS:
        values = dict.fromkeys(str(entry[key]) for entry in metadata)  # each once, in their order
        lines.append(f"{key:<13} {' | '.join(values)}")
    tables = [_statistics(table) for file in files for table in batches(file)]
    rows = pd.concat(tables, ignore_index=True)
    share = rows.groupby("group").positive.mean()
    mixed = share.between(0, 1, inclusive="neither").sum()
    lines.append(f"trajectories  {len(rows):,} of {rows.prompt_id.nunique():,} prompts")
    lines.append(f"groups        {len(share):,}, {mixed:,} of them with positives and negatives\n")
    table = rows.describe(percentiles=[0.5, 0.95]).T  # a row of statistics for each column
    return "\n".join([*lines, table.to_string(float_format="{:,.4g}".format)])


def _statistics(table: pa.Table) -> "pd.DataFrame":
    """The columns of the report, one row for each trajectory; `valid` is NaN where not graded."""
    rows = table.select(["prompt_id", "group", "reward"]).to_pandas()
    rows["positive"] = (rows.reward >= 0).astype(float)
    for name in ("finished", "valid"):
        rows[name] = table[name].to_pandas().astype(float)
    rows["prompt_tokens"] = pc.list_value_length(table["prompt_ids"]).to_numpy()
    rows["response_tokens"] = pc.list_value_length(table["response_ids"]).to_numpy()
    log_mu = []
    scores = table["ref_logprobs"].to_numpy()
    marks = table["sampled"].to_numpy()
    for log_probs, sampled in zip(scores, marks, strict=True):
        log_mu.append(log_probs.mean() if sampled is None else log_probs[sampled].mean())
    rows["log_mu_per_token"] = log_mu
    return rows


def samples(files: list[str], count: int) -> Iterator[str]:
    """The first `count` positives and negatives of trajectory files, as text."""
    import pyarrow.dataset as ds

    trajectories = ds.dataset(files, schema=SCHEMA)
    reward = pc.field("reward")
    for sign, chosen in (("positive", reward >= 0), ("negative", reward < 0)):
        for row in trajectories.head(count, filter=chosen).to_pylist():
            facts = [
                f"{key} {row[key]}" for key in ("reward", "finished", "valid", "answer", "gold")
            ]
            prompt = printable(row["prompt"], 800, kept="\n\t")
            response = printable(row["response"], 800, kept="\n\t")
            head = f"--- {sign}: {printable(', '.join(facts), 200)}"
            yield f"{head}\n[prompt]\n{prompt}\n[response]\n{response}"


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
        options = args[args.subcommand]
        if args.subcommand == "import":
            files = resolve_sources(options.files, "import")
            check_out(options.out, files)
            too_long = import_files(**options.as_dict() | {"files": files})
            print(f"{report([options.out])}\nleft out as too long: {too_long:,}")
        elif args.subcommand == "inspect":
            files = resolve_files(options.files, "inspect")
            print(report(files), *samples(files, options.samples), sep="\n\n")
        else:
            files = resolve_files(options.files, "curate")
            check_out(options.out, files)
            curation = Curation(
                options.way, options.budget, options.share, options.total, options.seed
            )
            done = curate(files, options.out, curation, options.iteration)
            for name, before in done["before"].items():
                print(f"{name:<14} {before} -> {done['after'][name]}")


if __name__ == "__main__":
    main()
