"""Select the trajectories to train on. One is positive, or correct, if its reward is above 0."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError
from topr.trajectories.file import SCHEMA, batches, read_metadata, write_table

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
        given = {name for name in ("budget", "share", "total") if getattr(self, name)}
        if self.way == "share" and given - {"total"} != {"share"}:
            raise InputError("share takes --share and perhaps --total")
        if self.way != "share" and given != {"budget"}:
            raise InputError(f"{self.way} takes --budget alone")

    def keep(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Sorted indices of the rows to keep, from the reward and the group of each row."""
        from topr.advantages import place_in_group

        rng = np.random.default_rng(self.seed)
        correct = np.flatnonzero(reward > 0)
        incorrect = np.flatnonzero(reward <= 0)
        if self.way == "uniform":
            rows = rng.permutation(len(group))
            kept = rows[place_in_group(group[rows]) < self.budget]
        elif self.way == "anna_karenina":
            first = correct[place_in_group(group[correct]) == 0]
            room = self.budget - np.isin(group[incorrect], group[first])  # of each one's group
            kept = np.r_[first, incorrect[place_in_group(group[incorrect]) < room]]
        else:
            positives, negatives = self._counts(len(correct), len(incorrect))
            kept_correct = rng.permutation(correct)[:positives]
            kept = np.r_[kept_correct, rng.permutation(incorrect)[:negatives]]
        return np.sort(kept)

    def _counts(self, correct: int, incorrect: int) -> tuple[int, int]:
        """Positives and negatives that `share` takes, of so many correct and incorrect ones."""
        share = self.share or 0.0
        if self.total is None:  # all of the scarcer sign
            positives = min(correct, round(incorrect * share / (1 - share)))
            negatives = min(incorrect, round(correct * (1 - share) / share))
        else:
            positives = round(self.total * share)
            negatives = self.total - positives
        if not (0 < positives <= correct and 0 < negatives <= incorrect):
            wanted = f"{positives} of {correct} positives, {negatives} of {incorrect} negatives"
            raise InputError(f"--share {share:g} would take {wanted}; change --share or --total")
        return positives, negatives


def figures(reward: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Counts of trajectories and groups, and the share of positives."""
    return {
        "trajectories": len(reward),
        "groups": len(np.unique(group)),
        "both_signs": len(np.intersect1d(group[reward > 0], group[reward <= 0])),
        "positive_share": float((reward > 0).mean()),
    }


def reward_and_group(files: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Reward and number of the group of all rows of trajectory files, which are checked."""
    tables = [table.select(["reward", "group"]) for file in files for table in batches(file)]
    rows = pa.concat_tables(tables)
    return rows["reward"].to_numpy(), np.unique(rows["group"].to_numpy(), return_inverse=True)[1]


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

    metadata = common_metadata(files)
    reward, group = reward_and_group(files)
    kept = curation.keep(reward, group)
    done = asdict(curation)
    done["before"] = figures(reward, group)
    done["after"] = figures(reward[kept], group[kept])
    metadata["sampling"]["curation"] = done
    table = ds.dataset(files, schema=SCHEMA).take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
        names = pc.binary_join_element_wise(str(iteration), table["group"], "/")
        table = table.set_column(SCHEMA.get_field_index("group"), "group", names)
    write_table(out, table, metadata)
    return done


def common_metadata(files: list[str]) -> dict[str, Any]:
    """The metadata that files agree on. Raises an InputError if their tokenizers differ."""
    entries = [read_metadata(file) for file in files]
    metadata = agreed(entries)
    if "tokenizer" not in metadata:
        raise InputError("the files have different tokenizers; curate them one by one")
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
