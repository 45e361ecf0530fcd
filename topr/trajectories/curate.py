"""Select the trajectories to train on; one is positive, or correct, where its reward is above 0."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jsonargparse.typing import NonNegativeInt, OpenUnitInterval, PositiveInt

from topr.io import InputError
from topr.trajectories.file import SCHEMA, agreed, batches, read_metadata, write_tables

Way = Literal["uniform", "anna_karenina", "share"]


@dataclass(frozen=True)
class Curation:
    """A way to select trajectories, with its arguments.

    Args:
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
        given = {name for name in ("budget", "share", "total") if getattr(self, name) is not None}
        if given not in ([{"share"}, {"share", "total"}] if self.way == "share" else [{"budget"}]):
            expected = (
                "--share, and --total if you like" if self.way == "share" else "--budget alone"
            )
            raise InputError(
                f"{self.way} takes {expected}; found {', '.join(sorted(given)) or 'none'}"
            )

    def keep(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
        """The sorted numbers of the rows to keep, from reward and group of each (arXiv:2503.14286, section 4.4)."""
        from topr.losses.advantages import place_in_group

        rng, budget = np.random.default_rng(self.seed), self.budget or 0
        correct, incorrect = np.flatnonzero(reward > 0), np.flatnonzero(reward <= 0)
        if self.way == "uniform":
            rows = rng.permutation(len(group))
            return np.sort(rows[place_in_group(group[rows]) < budget])
        if self.way == "anna_karenina":  # the first correct one of each group, then incorrect ones
            correct = correct[place_in_group(group[correct]) == 0]
            left = budget - np.isin(group[incorrect], group[correct])
            return np.sort(np.r_[correct, incorrect[place_in_group(group[incorrect]) < left]])
        p, positives, negatives = self.share or 0.0, len(correct), len(incorrect)
        if self.total is not None:
            right, wrong = round(self.total * p), self.total - round(self.total * p)
        elif positives * (1 - p) <= negatives * p:  # positives are scarce: all of them
            right, wrong = positives, round(positives * (1 - p) / p)
        else:
            right, wrong = round(negatives * p / (1 - p)), negatives
        if not (0 < right <= positives and 0 < wrong <= negatives):
            found = f"{right:,} of {positives:,} positives and {wrong:,} of {negatives:,} negatives"
            raise InputError(
                f"--share {p:g} would take {found}; it must be able to take one of each at least"
            )
        return np.sort(np.r_[rng.permutation(correct)[:right], rng.permutation(incorrect)[:wrong]])


def figures(reward: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Counts of trajectories and groups; the sizes of groups are the least, the median and the most."""
    size = np.unique(group, return_counts=True)[1]
    return {
        "trajectories": len(reward),
        "groups": len(size),
        "both_signs": len(np.intersect1d(group[reward > 0], group[reward <= 0])),
        "group_sizes": [int(size.min()), float(np.median(size)), int(size.max())],
        "positive_share": float((reward > 0).mean()),
    }


def curate(
    files: list[str], out: str | Path, curation: Curation, iteration: NonNegativeInt | None = None
) -> dict:
    """Write the rows to keep of trajectory files, read as one set, to one file, and return figures before and after;
    the metadata is what all files agree on, with the figures in its `sampling`.

    Args:
        out: trajectory file to write
        iteration: written to the metadata and before every group
    """
    import pyarrow.dataset as ds  # imports pandas

    found = [read_metadata(file) for file in files]
    tokenizers = {
        entry["tokenizer"]: file
        for file, entry in zip(files, found, strict=True)
        if entry["tokenizer"]
    }
    if len(tokenizers) > 1:
        raise InputError(
            f"{' and '.join(tokenizers.values())} have different tokenizers; curate them one by one"
        )
    metadata = agreed(found) | {"tokenizer": next(iter(tokenizers), None)}
    if (
        not {"policy", "precision"} <= metadata.keys()
    ):  # whether log mu fits a policy depends on both
        metadata |= {"policy": None, "precision": None}
    sampling = agreed([entry["sampling"] or {} for entry in found])
    rows = pa.concat_tables(
        table.select(["reward", "group"]) for file in files for table in batches(file)
    )
    reward, group = (
        rows["reward"].to_numpy(),
        np.unique(rows["group"].to_numpy(), return_inverse=True)[1],
    )
    kept = curation.keep(reward, group)
    done = {name: value for name, value in asdict(curation).items() if value is not None}
    done |= {"before": figures(reward, group), "after": figures(reward[kept], group[kept])}
    done |= {"earlier": sampling["curation"]} if "curation" in sampling else {}
    table = ds.dataset(files, schema=SCHEMA).take(kept)
    if iteration is not None:
        metadata["iteration"] = iteration
        names = pc.binary_join_element_wise(str(iteration), table["group"], "/")
        table = table.set_column(SCHEMA.get_field_index("group"), "group", names)
    write_tables(out, [table], metadata | {"sampling": sampling | {"curation": done}})
    return done
