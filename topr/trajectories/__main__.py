"""The command `python -m topr.trajectories`: import, inspect, curate; --help needs neither torch nor pandas."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt

from topr.io import ArgumentParser, InputError, check_folder, command, printable
from topr.trajectories.curate import Curation, curate
from topr.trajectories.file import METADATA_KEYS, SCHEMA, batches, read_metadata, resolve_files
from topr.trajectories.importing import import_files


def report(files: list[str]) -> str:
    """Report on trajectory files, read as one set in batches; raises InputError for a bad file or row."""
    import pandas as pd

    from topr.losses import advantage_share

    metadata = [read_metadata(file) for file in files]
    unknown = [(entry["sampling"] or {}).get("unknown_tokens") for entry in metadata]
    tables = (
        _numbers(t, tokens or [])
        for file, tokens in zip(files, unknown, strict=True)
        for t in batches(file)
    )
    rows = pd.concat(tables, ignore_index=True)
    unknown_share = rows.pop("unknown").sum() / rows.response_tokens.sum()
    positive, cut, valid = rows.reward >= 0, ~rows.finished, rows.valid.dropna()
    rate, share = positive.groupby(rows.group).mean(), advantage_share(rows.reward.to_numpy())
    facts = {
        **{
            key: " | ".join(dict.fromkeys(str(entry[key]) for entry in metadata))
            for key in METADATA_KEYS
        },
        "trajectories": f"{len(rows):,} of {rows.prompt_id.nunique():,} prompts in {len(files):,} file(s)",
        "not finished": f"{cut.sum():,} ({cut.mean():.1%})",
        "invalid": f"{1 - valid.mean():.1%} of {len(valid):,} graded"
        if len(valid)
        else "not recorded",
        "reward >= 0": f"{positive.mean():.1%}, effective share at baseline 0: {share:.1%}",
        "groups": f"{len(rate)}, {rate.between(0, 1, 'neither').sum()} with both signs, {rate.eq(0).sum()} negative",
        "unknown": "not recorded"
        if None in unknown
        else f"{unknown_share:.1%} of the response tokens",
        "log mu": f"{rows.log_mu.sum() / rows.sampled_tokens.sum():.3f} per token",
    }
    table = (
        rows.describe(percentiles=[0.5, 0.95])
        .T.drop(columns="count")
        .to_string(float_format="{:,.4g}".format)
    )
    return "\n".join([*(f"{key:<13} {fact}" for key, fact in facts.items()), "", table])


def _numbers(table: pa.Table, unknown_tokens: list[int]) -> Any:
    prompt, response = (
        pc.list_value_length(table[name]).to_numpy() for name in ("prompt_ids", "response_ids")
    )
    rows = table.select(["prompt_id", "group", "reward", "finished", "valid"]).to_pandas()
    columns = (table[name].to_numpy() for name in ("ref_logprobs", "sampled"))
    scores = [
        log_probs[slice(None) if marks is None else marks]
        for log_probs, marks in zip(*columns, strict=True)
    ]
    found = {
        "sampled_tokens": list(map(len, scores)),
        "log_mu": [log_probs.sum() for log_probs in scores],
    }
    unknown = table["response_ids"].to_pandas().map(lambda ids: np.isin(ids, unknown_tokens).sum())
    return rows.assign(prompt_tokens=prompt, response_tokens=response, **found, unknown=unknown)


def samples(files: list[str], count: int) -> Iterator[str]:
    """The first `count` positives and negatives of trajectory files, as text."""
    import pyarrow.dataset as ds

    for sign, rows in (("positive", pc.field("reward") >= 0), ("negative", pc.field("reward") < 0)):
        for row in ds.dataset(files, schema=SCHEMA).head(count, filter=rows).to_pylist():
            facts = ", ".join(
                f"{key} {row[key]}" for key in ("reward", "finished", "valid", "answer", "gold")
            )
            prompt, response = (
                printable(row[name], 800, kept="\n\t") for name in ("prompt", "response")
            )
            yield f"--- {sign}: {printable(facts, 200)}\n[prompt]\n{prompt}\n[response]\n{response}"


def main() -> None:
    parser = ArgumentParser(
        prog="python -m topr.trajectories", description="Make, inspect, select trajectory files."
    )
    commands = parser.add_subcommands()
    converter = ArgumentParser(
        description="Tokenise responses that have rewards, and score log mu."
    )
    rows = "JSON lines (.gz and .zst too), Parquet, or hub data sets owner/name[/config]:split; globs are welcome"
    converter.add_argument("files", nargs="+", type=str, help=rows)
    converter.add_function_arguments(import_files, as_group=False, skip={"files"})
    commands.add_subcommand("import", converter)
    inspector = ArgumentParser(description="Report on trajectory files and show samples.")
    inspector.add_argument(
        "--samples", type=NonNegativeInt, default=1, help="trajectories to show of each sign"
    )
    commands.add_subcommand("inspect", inspector)
    selector = ArgumentParser(description="Select the trajectories to train on.")
    selector.add_class_arguments(
        Curation, as_group=False, as_positional=True
    )  # `way` is the one required
    for reader in (inspector, selector):
        reader.add_argument(
            "files",
            nargs="+",
            type=str,
            help="trajectory files, read as one set; globs are welcome",
        )
    selector.add_function_arguments(curate, as_group=False, skip={"files", "curation"})
    commands.add_subcommand("curate", selector)
    with command():
        args = parser.parse_args()
        options = args[args.subcommand]
        files = resolve_files(options.files, args.subcommand, rows=args.subcommand == "import")
        if args.subcommand == "inspect":
            print(report(files), *samples(files, options.samples), sep="\n\n")
            return
        if os.path.isdir(options.out or ".") or os.path.realpath(options.out) in map(
            os.path.realpath, files
        ):
            raise InputError(
                f"--out {options.out} is a folder or one of the inputs; name a new Parquet file"
            )
        check_folder("--out: the folder", Path(options.out).parent)
        if args.subcommand == "import":
            too_long, equal = import_files(**options.as_dict() | {"files": files})
            left_out = f"left out as too long: {too_long:,}, as pairs of equal responses: {equal:,}"
            print(f"{report([options.out])}\nwrote {options.out}; {left_out}")
        else:
            curation = Curation(
                options.way, options.budget, options.share, options.total, options.seed
            )
            done = curate(files, options.out, curation, options.iteration)
            lines = (
                f"{name:<14} {value} -> {done['after'][name]}"
                for name, value in done["before"].items()
            )
            print(*lines, f"wrote {options.out}", sep="\n")


if __name__ == "__main__":
    main()
