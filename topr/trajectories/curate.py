"""Select the trajectories to train on. One is positive, or correct, if its reward is above 0."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError
from topr.trajectories.file import SCHEMA, batches, read_metadata, write_table

if TYPE_CHECKING:
    import pandas as pd

Way = Literal["uniform", "anna_karenina", "share"]


def curate(
    way: Way,
    files: list[str],
    out: str | Path,
    budget: PositiveInt | None = None,
    share: OpenUnitInterval | None = None,
    total: PositiveInt | None = None,
    seed: NonNegativeInt = 0,
    iteration: NonNegativeInt | None = None,
) -> None:
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
    import pyarrow.dataset as ds  # imports pandas

    metadata = common_metadata(files)
    rows = read_rows(files)
    rng = np.random.default_rng(seed)
    if way == "share" and share is not None:
        kept = with_share(rows, share, total, rng)
    elif way == "uniform" and budget is not None:
        kept = uniform(rows, budget, rng)
    elif way == "anna_karenina" and budget is not None:
        kept = anna_karenina(rows, budget)
    else:
        raise InputError("share needs --share, uniform and anna_karenina need --budget")
    done = {"way": way, "budget": budget, "share": share, "total": total, "seed": seed}
    done |= {"before": figures(rows), "after": figures(rows.loc[kept])}
    print(f"before {done['before']}\nafter  {done['after']}")
    metadata["sampling"]["curation"] = done
    table = ds.dataset(files, schema=SCHEMA).take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
        names = pc.binary_join_element_wise(str(iteration), table["group"], "/")
        table = table.set_column(SCHEMA.get_field_index("group"), "group", names)
    write_table(out, table, metadata)


def uniform(rows: "pd.DataFrame", budget: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted numbers of `budget` random rows of each group."""
    shuffled = rows.loc[rng.permutation(len(rows))]
    return np.sort(shuffled.groupby("group").head(budget).index)


def anna_karenina(rows: "pd.DataFrame", budget: int) -> np.ndarray:
    """Sorted numbers of the first correct row of each group, and incorrect ones up to `budget`."""
    import pandas as pd

    first = rows[rows["reward"] > 0].groupby("group").head(1)
    candidates = pd.concat([first, rows[rows["reward"] <= 0]])
    return np.sort(candidates.groupby("group").head(budget).index)


def with_share(
    rows: "pd.DataFrame", share: float, total: int | None, rng: np.random.Generator
) -> np.ndarray:
    """Sorted numbers of random rows with a share of positives: `total`, or as many as possible."""
    correct = rng.permutation(rows.index[rows["reward"] > 0])
    incorrect = rng.permutation(rows.index[rows["reward"] <= 0])
    size = total or min(len(correct) / share, len(incorrect) / (1 - share))
    positives = round(size * share)
    negatives = round(size * (1 - share))
    if not (0 < positives <= len(correct) and 0 < negatives <= len(incorrect)):
        raise InputError(
            f"share would take {positives} of {len(correct)} positives and {negatives} of "
            f"{len(incorrect)} negatives; change --share or --total"
        )
    return np.sort(np.r_[correct[:positives], incorrect[:negatives]])


def read_rows(files: list[str]) -> "pd.DataFrame":
    """Reward and group of all rows of trajectory files, which are checked."""
    tables = [table.select(["reward", "group"]) for file in files for table in batches(file)]
    return pa.concat_tables(tables).to_pandas()


def figures(rows: "pd.DataFrame") -> dict[str, Any]:
    """Counts of trajectories and groups, and the share of positives."""
    return {
        "trajectories": len(rows),
        "groups": rows["group"].nunique(),
        "positive_share": float((rows["reward"] > 0).mean()),
    }


def common_metadata(files: list[str]) -> dict[str, Any]:
    """The metadata that files agree on. Raises an InputError if their tokenizers differ."""
    entries = [read_metadata(file) for file in files]
    metadata = agreed(entries)
    if "tokenizer" not in metadata:
        raise InputError("the files have different tokenizers; take them one by one")
    if not {"policy", "precision"} <= metadata.keys():  # log mu depends on both
        metadata["policy"] = metadata["precision"] = None
    metadata["sampling"] = agreed([entry["sampling"] or {} for entry in entries])
    return metadata


def agreed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The items that all dictionaries share."""
    shared = entries[0]
    for entry in entries:
        shared = {key: value for key, value in shared.items() if entry.get(key) == value}
    return shared
