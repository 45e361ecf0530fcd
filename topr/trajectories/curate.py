"""Select the trajectories to train on. One is positive, or correct, if its reward is above 0."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError
from topr.trajectories.file import SCHEMA, batches, read_metadata, write_tables

Way = Literal["uniform", "anna_karenina", "share"]


@dataclass(frozen=True)
class Curation:
    """A way to select trajectories, with its arguments (arXiv:2503.14286, section 4.4).

    Args:
        way: random ones, the first correct one and then incorrect ones, or a share of positives
        budget: trajectories of each group, for uniform and anna_karenina
        share: of positives among all that are kept, for share
        total: trajectories that share keeps; as many as possible by default
        seed: of random choices
    """

    way: Way
    budget: PositiveInt | None = None
    share: OpenUnitInterval | None = None
    total: PositiveInt | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self):
        if self.way == "share":
            fits = self.share and not self.budget
            expected = "--share and perhaps --total"
        else:
            fits = self.budget and not self.share and not self.total
            expected = "--budget alone"
        if not fits:
            raise InputError(f"{self.way} takes {expected}")

    def keep(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Sorted indices of the rows to keep, from the reward and the group of each row."""
        from topr.advantages import place_in_group

        rng = np.random.default_rng(self.seed)
        budget = self.budget or 0  # of a group
        correct = np.flatnonzero(reward > 0)
        incorrect = np.flatnonzero(reward <= 0)
        if self.way == "uniform":
            rows = rng.permutation(len(group))
            kept = rows[place_in_group(group[rows]) < budget]
        elif (
            self.way == "anna_karenina"
        ):  # the first correct one of each group, then incorrect ones
            first = correct[place_in_group(group[correct]) == 0]
            room = budget - np.isin(group[incorrect], group[first])
            kept = np.r_[first, incorrect[place_in_group(group[incorrect]) < room]]
        else:
            positives, negatives = self._counts(len(correct), len(incorrect))
            kept_correct = rng.permutation(correct)[:positives]
            kept = np.r_[kept_correct, rng.permutation(incorrect)[:negatives]]
        return np.sort(kept)

    def _counts(self, correct: int, incorrect: int) -> tuple[int, int]:
        """Positives and negatives that `share` takes, of so many correct and incorrect ones."""
        share = self.share or 0.0
        if self.total is not None:
            positives = round(self.total * share)
            negatives = self.total - positives
        elif correct * (1 - share) <= incorrect * share:  # positives are scarce: all of them
            positives = correct
            negatives = round(correct * (1 - share) / share)
        else:
            positives = round(incorrect * share / (1 - share))
            negatives = incorrect
        if not (0 < positives <= correct and 0 < negatives <= incorrect):
            problem = (
                f"{positives:,} of {correct:,} positives, {negatives:,} of {incorrect:,} negatives"
            )
            raise InputError(f"--share {share:g} would take {problem}; change --share or --total")
        return positives, negatives


def figures(reward: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Counts of trajectories and groups; `group_sizes` are the least, the median and the most."""
    sizes = np.unique(group, return_counts=True)[1]
    return {
        "trajectories": len(reward),
        "groups": len(sizes),
        "both_signs": len(np.intersect1d(group[reward > 0], group[reward <= 0])),
        "group_sizes": [int(sizes.min()), float(np.median(sizes)), int(sizes.max())],
        "positive_share": float((reward > 0).mean()),
    }


def curate(
    files: list[str], out: str | Path, curation: Curation, iteration: NonNegativeInt | None = None
) -> dict[str, Any]:
    """Select from trajectory files, read as one set; returns figures before and after.

    Args:
        files: trajectory files
        out: trajectory file to write
        curation: the way to select
        iteration: written to the metadata and before every group
    """
    import pyarrow.dataset as ds  # imports pandas

    metadata = _common_metadata(files)
    tables = [table.select(["reward", "group"]) for file in files for table in batches(file)]
    rows = pa.concat_tables(tables)
    reward = rows["reward"].to_numpy()
    group = np.unique(rows["group"].to_numpy(), return_inverse=True)[1]
    kept = curation.keep(reward, group)
    before = figures(reward, group)
    after = figures(reward[kept], group[kept])
    done = asdict(curation) | {"before": before, "after": after}
    metadata["sampling"] |= {"curation": done}
    table = ds.dataset(files, schema=SCHEMA).take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
        names = pc.binary_join_element_wise(str(iteration), table["group"], "/")
        table = table.set_column(SCHEMA.get_field_index("group"), "group", names)
    write_tables(out, [table], metadata)
    return done


def _common_metadata(files: list[str]) -> dict[str, Any]:
    """The metadata that files agree on. Raises an InputError if their tokenizers differ."""
    entries = [read_metadata(file) for file in files]
    tokenizers = {entry["tokenizer"] for entry in entries} - {None}
    if len(tokenizers) > 1:
        raise InputError("the files have different tokenizers; curate them one by one")
    metadata = agreed(entries)
    metadata["tokenizer"] = next(iter(tokenizers), None)
    metadata["sampling"] = agreed([entry["sampling"] or {} for entry in entries])
    if not {"policy", "precision"} <= metadata.keys():  # log mu depends on both
        metadata["policy"] = metadata["precision"] = None
    return metadata


def agreed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The items that all dictionaries share."""
    shared = entries[0]
    for entry in entries:
        shared = {key: value for key, value in shared.items() if entry.get(key) == value}
    return shared
