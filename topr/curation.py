"""Which of the sampled trajectories to train on: uniform, Anna Karenina, or a share of positives.

python -m topr.curation anna_karenina "runs/sampled/*.parquet" --budget 16 --out kept.parquet

A trajectory is positive, or correct, where its reward is above 0. The functions take rewards and groups, one of each
per row, and return the numbers of the rows that are kept, sorted; only `curate` touches files.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from topr.io import ArgumentParser, InputError, check_counts, check_folder, command
from topr.rows import resolve_files
from topr.trajectories import SCHEMA, batches, read_metadata, write_tables

Way = Literal["uniform", "anna_karenina", "share"]


def uniform(group: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """`budget` trajectories of each group by chance, all of a smaller group."""
    shuffled = np.random.default_rng(seed).permutation(len(group))
    return np.sort(shuffled[_place(group[shuffled]) < budget])


def anna_karenina(reward: np.ndarray, group: np.ndarray, budget: int) -> np.ndarray:
    """The first correct trajectory of each group, and as many incorrect ones, the first too, as its budget still takes.

    Correct solutions are all alike; each incorrect one is incorrect in its own way (arXiv:2503.14286, section 4.4). The
    groups should come from a larger pool: one with too few incorrect trajectories stays below its budget, and one
    without a correct trajectory gets `budget` incorrect ones.
    """
    correct, incorrect = np.flatnonzero(reward > 0), np.flatnonzero(~(reward > 0))
    correct = correct[_place(group[correct]) == 0]
    left = budget - np.isin(group[incorrect], group[correct])
    return np.sort(np.concatenate([correct, incorrect[_place(group[incorrect]) < left]]))


def share(reward: np.ndarray, positive_share: float, total: int | None, seed: int) -> np.ndarray:
    """Trajectories by chance, whatever their group, with this share of positives, to the nearest whole trajectory.

    Without a `total` they are as many as possible: all of the scarce sign, and of the other what the share takes.

    Raises:
        InputError: there are too few of a sign, or the rounding would take none.
    """
    rows = np.flatnonzero(reward > 0), np.flatnonzero(~(reward > 0))
    positives, negatives = map(len, rows)
    if positives * (1 - positive_share) <= negatives * positive_share:
        most = positives, round(positives * (1 - positive_share) / positive_share)
    else:
        most = round(negatives * positive_share / (1 - positive_share)), negatives
    wanted = most if total is None else (round(total * positive_share), total - round(total * positive_share))
    if not min(wanted) or wanted[0] > positives or wanted[1] > negatives:
        raise InputError(
            f"a share of {positive_share:g} would take {wanted[0]:,} of {positives:,} positives and {wanted[1]:,} of "
            f"{negatives:,} negatives, and must take one of each at least; it can be had of {sum(most):,} trajectories "
            "at most: change --share or --total"
        )
    rng = np.random.default_rng(seed)
    return np.sort(np.concatenate([rng.permutation(of)[:n] for of, n in zip(rows, wanted, strict=True)]))


def _place(group: np.ndarray) -> np.ndarray:
    """Each row's place within its group, from 0."""
    order = np.argsort(group, kind="stable")
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group)) - np.searchsorted(group, group[order], sorter=order)
    return place


@dataclass(frozen=True)
class Curation:
    """One of the ways with its arguments.

    Args:
        way: `uniform`, `anna_karenina` or `share`.
        budget: trajectories of a group, of the first two.
        share: of positives among all that are kept.
        total: trajectories that `share` keeps; None for as many as possible.
        seed: of what is chosen by chance.

    Raises:
        InputError: an argument lies outside its range, is missing, or belongs to another way.
    """

    way: Way
    budget: int | None = None
    share: float | None = None
    total: int | None = None
    seed: int = 0

    def __post_init__(self):
        check_counts("--", budget=self.budget, total=self.total)
        check_counts("--", least=0, most=2**63, seed=self.seed)
        needed, other = ("share", "budget") if self.way == "share" else ("budget", "share")
        if getattr(self, needed) is None or getattr(self, other) is not None:
            raise InputError(f"{self.way} takes --{needed}, and no --{other}; give that, or another way")
        if self.total is not None and self.way != "share":
            raise InputError(f"{self.way} takes no --total; set --budget, the trajectories of each group")
        if self.share is not None and not 0 < self.share < 1:
            raise InputError(f"--share is {self.share:g}; it must lie between 0 and 1")

    def keep(self, reward: np.ndarray, group: np.ndarray) -> np.ndarray:
        """The rows that are kept.

        Args:
            reward: of each trajectory.
            group: any value, the same for the trajectories of one group.
        """
        if self.way == "uniform":
            return uniform(group, self.budget, self.seed)
        if self.way == "anna_karenina":
            return anna_karenina(reward, group, self.budget)
        return share(reward, self.share, self.total, self.seed)


def figures(reward: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Trajectories, groups, groups with both signs, trajectories of a group (least, median, most), positive share."""
    _, member, size = np.unique(group, return_inverse=True, return_counts=True)
    correct = np.bincount(member, reward > 0)
    return {
        "trajectories": len(reward),
        "groups": len(size),
        "both_signs": int(((correct > 0) & (correct < size)).sum()),
        "group_sizes": [int(size.min()), float(np.median(size)), int(size.max())],
        "positive_share": float((reward > 0).mean()),
    }


def curate(files: list[str], out: str | Path, curation: Curation, iteration: int | None = None) -> dict[str, Any]:
    """Write the rows that are kept of trajectory files, in their order, to one file.

    Its metadata is what all files agree on; `sampling` says under `curation` what this function returns. In memory are
    two numbers of each row, and a batch of whole rows.

    Args:
        files: the trajectories, taken as one set.
        out: the file to write.
        curation: which rows to keep.
        iteration: written to the metadata and put before every `group`, which is one prompt in one iteration; None
            leaves both as they are.

    Returns:
        The curation's arguments, and the `figures` `before` and `after`.

    Raises:
        InputError: a file is no trajectory file, holds a bad row, or has another tokenizer than the others; or the
            trajectories are too few.
    """
    metadata = _agreed(files)
    reward, group = _columns(files)
    kept = curation.keep(reward, group)
    given = {name: value for name, value in asdict(curation).items() if value is not None}
    done = given | {"before": figures(reward, group), "after": figures(reward[kept], group[kept])}
    if earlier := metadata["sampling"].get("curation"):
        done["earlier"] = earlier
    metadata["sampling"] = metadata["sampling"] | {"curation": done}
    if iteration is not None:
        metadata["iteration"] = iteration
    write_tables(out, _rows(files, kept, iteration), metadata)
    return done


def _agreed(files: list[str]) -> dict[str, Any]:
    """The metadata that files share; null where they differ, but for the keys of `sampling`, which is never null."""
    found = [read_metadata(file) for file in files]
    tokenizers = {entry["tokenizer"]: file for file, entry in zip(files, found, strict=True) if entry["tokenizer"]}
    if len(tokenizers) > 1:
        one, other, *_ = tokenizers.values()
        raise InputError(f"{one} and {other} were tokenised with different tokenizers; curate them one by one")
    agreed = {key: value if all(entry[key] == value for entry in found) else None for key, value in found[0].items()}
    if None in (agreed["policy"], agreed["precision"]) and len({(e["policy"], e["precision"]) for e in found}) > 1:
        agreed |= {"policy": None, "precision": None}  # how well log mu fits the policy depends on both
    sampling = [entry["sampling"] or {} for entry in found]
    shared = {key: value for key, value in sampling[0].items() if all(key in s and s[key] == value for s in sampling)}
    return agreed | {"tokenizer": next(iter(tokenizers), None), "sampling": shared}


def _columns(files: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Reward and number of the group of every row, all rows checked."""
    reward, group, numbers = [], [], {}
    for file in files:
        for table in batches(file):
            reward.append(table["reward"].to_numpy())
            group.append(np.array([numbers.setdefault(name, len(numbers)) for name in table["group"].to_pylist()]))
    return np.concatenate(reward), np.concatenate(group)


def _rows(files: list[str], kept: np.ndarray, iteration: int | None) -> Iterator[pa.Table]:
    """The rows of these numbers, batch by batch."""
    start, place = 0, SCHEMA.get_field_index("group")
    for file in files:
        for table in batches(file):
            first, last = np.searchsorted(kept, [start, start + len(table)])
            start, chosen = start + len(table), table.take(pa.array(kept[first:last] - start))
            if iteration is not None:
                named = pc.binary_join_element_wise(str(iteration), chosen["group"], "/")
                chosen = chosen.set_column(place, "group", named)
            yield chosen


def tell(done: dict[str, Any]) -> str:
    """What `curate` returned as a table."""
    lines = [f"{'':20} {'before':>16} {'after':>16}"]

    def line(name: str, form) -> None:
        lines.append(f"{name:20} " + " ".join(f"{form(done[when]):>16}" for when in ("before", "after")))

    line("trajectories", lambda f: f"{f['trajectories']:,}")
    line("share of positives", lambda f: f"{f['positive_share']:.1%}")
    line("groups", lambda f: f"{f['groups']:,}")
    line("  with both signs", lambda f: f"{f['both_signs']:,}")
    line("  least/median/most", lambda f: "/".join(f"{size:g}" for size in f["group_sizes"]))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a `Curation` but for its way and seed."""
    parser.add_argument("--budget", type=int, help="trajectories of a group: uniform and anna_karenina")
    parser.add_argument("--share", type=float, help="of positives among all that are kept: share")
    parser.add_argument("--total", type=int, help="trajectories that share keeps (default: as many as possible)")


def main() -> None:
    parser = ArgumentParser(prog="python -m topr.curation", description="Choose the trajectories to train on.")
    parser.add_argument("way", choices=get_args(Way), help="how")
    parser.add_argument("files", nargs="+", help="trajectory files, taken as one; globs are welcome")
    parser.add_argument("--out", required=True, help="Parquet file to write")
    add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of what is chosen by chance (default 0)")
    parser.add_argument("--iteration", type=int, help="to write to the metadata and before every group")
    with command():
        args = parser.parse_args()
        check_counts("--", least=0, iteration=args.iteration)
        curation = Curation(args.way, args.budget, args.share, args.total, args.seed)
        files = resolve_files(args.files, "FILES")
        if os.path.isdir(args.out) or any(os.path.exists(args.out) and os.path.samefile(args.out, f) for f in files):
            raise InputError(f"--out {args.out} is a folder or one of the inputs; name a Parquet file of its own")
        check_folder("--out: the folder", Path(args.out).parent)
        print(tell(curate(files, args.out, curation, args.iteration)))
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
