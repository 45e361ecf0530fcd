"""Select the trajectories to train on. One is positive, or correct, if its reward is above 0."""

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError, check_absent
from topr.trajectories.file import read_metadata, read_table, write_table

Way = Literal["uniform", "anna_karenina", "share"]


def curate(
    way: Way,
    files: list[str],
    out: str | Path,
    budget: PositiveInt = 16,
    share: OpenUnitInterval = 0.5,
    total: PositiveInt | None = None,
    seed: NonNegativeInt = 0,
    iteration: NonNegativeInt | None = None,
    overwrite: bool = False,
):
    """Select from trajectory files, read as one set (arXiv:2503.14286, section 4.4).

    Args:
        way: random ones, the first correct one and then incorrect ones, or a share of positives
        files: trajectory files
        out: trajectory file to write
        budget: trajectories of each group, for uniform and anna_karenina
        share: of positives among all that are kept, for share
        total: trajectories that share keeps; as many as possible by default
        seed: of random choices
        iteration: written to the metadata
        overwrite: replace the file that is there
    """
    check_absent(out, overwrite)
    table, metadata = read_files(files)
    rows = table.select(["reward", "group", "prompt"]).to_pandas()
    rows["group"] = rows.groupby(["group", "prompt"]).ngroup()
    rng = np.random.default_rng(seed)
    if way == "share":
        kept = with_share(rows["reward"], share, total, rng)
    else:
        kept = of_each_group(rows, way, budget, rng)
    table = table.take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
    chosen = {"way": way, "budget": budget, "share": share, "total": total, "seed": seed}
    metadata["sampling"] = (metadata.get("sampling") or {}) | {"curation": chosen}
    write_table(out, table, metadata)
    print(f"kept {len(kept)} of {len(rows)} trajectories")


def of_each_group(
    rows: pd.DataFrame, way: Way, budget: int, rng: np.random.Generator
) -> np.ndarray:
    """Sorted numbers of `budget` rows of each group: random ones, or the first correct one and then
    incorrect ones."""
    if way == "uniform":
        candidates = rows.loc[rng.permutation(len(rows))]
    else:
        first = rows[rows["reward"] > 0].groupby("group").head(1)
        candidates = pd.concat([first, rows[rows["reward"] <= 0]])
    return np.sort(candidates.groupby("group").head(budget).index)


def with_share(
    reward: np.ndarray, share: float, total: int | None, rng: np.random.Generator
) -> np.ndarray:
    """Sorted numbers of random rows with a share of positives: `total`, or as many as possible."""
    correct = rng.permutation(np.flatnonzero(reward > 0))
    incorrect = rng.permutation(np.flatnonzero(reward <= 0))
    size = total or min(len(correct) / share, len(incorrect) / (1 - share))
    positives = round(size * share)
    negatives = total - positives if total else round(size * (1 - share))
    if not (0 < positives <= len(correct) and 0 < negatives <= len(incorrect)):
        raise InputError(
            f"{len(correct)} positives and {len(incorrect)} negatives are too few for a share of "
            f"{share}",
            "sample more, or take another share or total",
        )
    return np.sort(np.r_[correct[:positives], incorrect[:negatives]])


def read_files(files: list[str]) -> tuple[pa.Table, dict]:
    """Trajectory files as one table, and the metadata that they agree on. Groups of different
    policies or iterations get different names. Raises an InputError if their tokenizers differ."""
    entries = [read_metadata(file) for file in files]
    metadata = agreed(entries)
    if "tokenizer" not in metadata:
        raise InputError("the files have different tokenizers; take them one by one")
    tables = []
    for file, entry in zip(files, entries, strict=True):
        table = read_table(file)
        if not {"policy", "iteration"} <= metadata.keys():
            origin = f"{entry['policy']}/{entry['iteration']}"
            groups = pc.binary_join_element_wise(origin, table["group"], "/")
            table = table.set_column(table.column_names.index("group"), "group", groups)
        tables.append(table)
    return pa.concat_tables(tables), metadata


def agreed(entries: list[dict]) -> dict:
    """The items that all dictionaries share."""
    shared = entries[0]
    for entry in entries:
        shared = {key: value for key, value in shared.items() if entry.get(key) == value}
    return shared
