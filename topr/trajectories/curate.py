"""Select the trajectories to train on. One is positive, or correct, if its reward is above 0."""

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError
from topr.trajectories.file import SCHEMA, read_metadata, read_table, write_table

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
        iteration: written to the metadata and before every group
    """
    table, metadata = read_files(files)
    rows = table.select(["reward", "group"]).to_pandas()
    rng = np.random.default_rng(seed)
    if way == "share":
        kept = with_share(rows, share, total, rng)
    elif way == "uniform":
        kept = uniform(rows, budget, rng)
    else:
        kept = anna_karenina(rows, budget)
    table = table.take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
        names = pc.binary_join_element_wise(str(iteration), table["group"], "/")
        table = table.set_column(SCHEMA.get_field_index("group"), "group", names)
    chosen = {"way": way, "budget": budget, "share": share, "total": total, "seed": seed}
    metadata["sampling"] = (metadata.get("sampling") or {}) | {"curation": chosen}
    write_table(out, table, metadata)
    print(f"kept {len(kept)} of {len(rows)} trajectories")


def uniform(rows: pd.DataFrame, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted numbers of `budget` random rows of each group."""
    shuffled = rows.loc[rng.permutation(len(rows))]
    return np.sort(shuffled.groupby("group").head(budget).index)


def anna_karenina(rows: pd.DataFrame, budget: int) -> np.ndarray:
    """Sorted numbers of the first correct row of each group, and incorrect ones up to `budget`."""
    first = rows[rows["reward"] > 0].groupby("group").head(1)
    candidates = pd.concat([first, rows[rows["reward"] <= 0]])
    return np.sort(candidates.groupby("group").head(budget).index)


def with_share(
    rows: pd.DataFrame, share: float, total: int | None, rng: np.random.Generator
) -> np.ndarray:
    """Sorted numbers of random rows with a share of positives: `total`, or as many as possible."""
    correct = rng.permutation(rows.index[rows["reward"] > 0])
    incorrect = rng.permutation(rows.index[rows["reward"] <= 0])
    size = total or min(len(correct) / share, len(incorrect) / (1 - share))
    positives = round(size * share)
    negatives = round(size * (1 - share))
    if not (0 < positives <= len(correct) and 0 < negatives <= len(incorrect)):
        raise InputError(
            f"{len(correct)} positives and {len(incorrect)} negatives are too few for a share of "
            f"{share}",
            "sample more, or take another share or total",
        )
    return np.sort(np.r_[correct[:positives], incorrect[:negatives]])


def read_files(files: list[str]) -> tuple[pa.Table, dict]:
    """Trajectory files as one table, and the metadata that they agree on. Raises an InputError if
    their tokenizers differ."""
    metadata = agreed([read_metadata(file) for file in files])
    if "tokenizer" not in metadata:
        raise InputError("the files have different tokenizers; take them one by one")
    return pa.concat_tables(map(read_table, files)), metadata


def agreed(entries: list[dict]) -> dict:
    """The items that all dictionaries share."""
    shared = entries[0]
    for entry in entries:
        shared = {key: value for key, value in shared.items() if entry.get(key) == value}
    return shared
