"""What trajectory files hold: counts, lengths, rewards, log-probs, samples, read a batch at a time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from topr.io import printable
from topr.losses import advantage_share
from topr.rows import open_parquet
from topr.trajectories import batches, read_metadata

BINS = 10
BAR = 24
SHOWN = 800  # characters of a sample's prompt and response
BREAKS = "\n\t"  # and what of them need not be escaped


def report(files: list[str]) -> str:
    """Report on trajectory files taken as one; a row costs some 100 bytes of memory, whatever its length.

    Raises:
        InputError: a file is no trajectory file or holds a bad row; see `read_metadata` and `batches`.
    """
    metadata = [read_metadata(file) for file in files]
    parts = [_columns(table) for file in files for table in batches(file)]
    column = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    reward, response, finished = column["reward"], column["response_tokens"], column["finished"]
    groups, member = np.unique(column["group"], return_inverse=True)
    positive = np.bincount(member, reward >= 0)
    negative = np.bincount(member, reward < 0)
    graded = column["valid"][column["valid"] >= 0]
    total = len(reward)
    lines = [
        *_origin(files, metadata),
        "",
        f"trajectories      {total:,} of {len(np.unique(column['prompt_id'])):,} prompts in {len(groups):,} groups, "
        f"{total - len(np.unique(column['identity'])):,} exact duplicates",
        f"finished          {finished.mean():.1%}, truncated {1 - finished.mean():.1%} ({(~finished).sum():,}); "
        + (f"invalid {1 - graded.mean():.1%}" if len(graded) else "validity is not recorded"),
        f"prompt tokens     {_spread(column['prompt_tokens'])}",
        f"response tokens   {_spread(response)}",
        f"reward            mean {reward.mean(dtype=np.float64):.3f}; share >= 0: p = {(reward >= 0).mean():.3f}, "
        f"effective share at baseline 0: {advantage_share(reward):.3f}",
        f"groups            both signs {((positive > 0) & (negative > 0)).sum():,}, only positives "
        f"{(negative == 0).sum():,}, only negatives {(positive == 0).sum():,}",
        f"log mu            of a response: {_spread(column['log_mu'], '.1f')}; "
        f"of a token: mean {column['log_mu'].sum() / response.sum():.3f}",
        *_histogram("response tokens", response, reward >= 0),
    ]
    if set(np.unique(reward)) - {-1, 1}:
        lines += _histogram("reward", reward, reward >= 0)
    return "\n".join(lines)


def samples(files: list[str], count: int) -> Iterator[str]:
    """Up to `count` positives and as many negatives of trajectory files in readable text, taken evenly over them."""
    reward = np.concatenate([table["reward"].to_numpy() for file in files for table in batches(file)])
    for sign, rows in (("positive", np.flatnonzero(reward >= 0)), ("negative", np.flatnonzero(reward < 0))):
        chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows)), dtype=int)]
        for row in _rows(files, set(chosen.tolist())):
            told = [f"reward {row['reward']:g}", "finished" if row["finished"] else "truncated"]
            told += ["invalid"] * (row["valid"] is False)
            told += [f"{key} {printable(row[key], 60)}" for key in ("answer", "gold") if row[key] is not None]
            head = f"--- {sign}: {', '.join(told)}"
            texts = (printable(row[name], SHOWN, BREAKS) for name in ("prompt", "response"))
            yield "{}\n[prompt]\n{}\n[response]\n{}".format(head, *texts)


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    """What the report needs of a batch: numbers and hashes, one of each per row."""
    ids = [table[name].combine_chunks() for name in ("prompt_ids", "response_ids")]
    lengths = [pc.list_value_length(column).to_numpy() for column in ids]
    starts = np.cumsum(lengths[1]) - lengths[1]
    log_mu = table["ref_logprobs"].combine_chunks().flatten().to_numpy().astype(np.float64)
    valid = table["valid"].cast(pa.int8()).fill_null(-1)
    hashed = {name: [hash(value) for value in table[name].to_pylist()] for name in ("prompt_id", "group")}
    pairs = zip(*(column.to_numpy(zero_copy_only=False) for column in ids), strict=True)
    hashed["identity"] = [hash((prompt.tobytes(), response.tobytes())) for prompt, response in pairs]
    return {
        "prompt_tokens": lengths[0],
        "response_tokens": lengths[1],
        "log_mu": np.add.reduceat(log_mu, starts),
        "reward": table["reward"].to_numpy(),
        "finished": table["finished"].to_numpy(),
        "valid": valid.to_numpy(),
        **{name: np.array(values, np.int64) for name, values in hashed.items()},
    }


def _origin(files: list[str], metadata: list[dict]) -> list[str]:
    """Where the trajectories come from; what differs between files is listed."""

    def known(key: str) -> str:
        values = dict.fromkeys("unknown" if entry[key] is None else str(entry[key]) for entry in metadata)
        return " | ".join(values).translate({ord(mark): None for mark in "{}'"})  # of the dictionary `sampling`

    size = sum(Path(file).stat().st_size for file in files)
    return [
        f"files             {files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}, {size / 1e6:,.1f} MB",
        f"task              {known('task')}, iteration {known('iteration')}",
        f"policy            {known('policy')}, tokenizer {known('tokenizer')}, scored in {known('precision')}",
        f"sampling          {known('sampling')}".replace(", curation: ", "\ncuration          "),
    ]


def _spread(values: np.ndarray, form: str = ",.0f") -> str:
    low, middle, high, top = np.quantile(values, [0, 0.5, 0.95, 1])
    return f"min {low:{form}}, median {middle:{form}}, 95% {high:{form}}, max {top:{form}}"


def _histogram(name: str, values: np.ndarray, positive: np.ndarray) -> list[str]:
    """Counts by value, or by range where there are many values, of positives and of negatives."""
    edges = np.unique(values)
    if len(edges) > BINS:
        low, high = float(edges[0]), float(edges[-1])
        edges = np.linspace(low, high, BINS + 1)[:-1]
        edges = np.ceil(edges) if np.issubdtype(values.dtype, np.integer) else edges
    place = np.searchsorted(edges, values, side="right") - 1
    counts = [np.bincount(place[mask], minlength=len(edges)) for mask in (positive, ~positive)]
    scale = BAR / max(map(max, counts))
    lines = ["", f"{name + ' from':>17} {'positives':<{BAR + 10}} negatives"]
    for edge, *row in zip(edges, *counts, strict=True):
        bars = [f"{'█' * int(np.ceil(count * scale))} {count:,}".lstrip() for count in row]
        lines.append(f"{edge:>17,.6g} {bars[0]:<{BAR + 10}} {bars[1]}")
    return lines


def _rows(files: list[str], indices: set[int]) -> Iterator[dict]:
    """Rows by their number over all files; row groups without one are skipped."""
    columns, start = ["prompt", "response", "reward", "finished", "valid", "answer", "gold"], 0
    for file in files:
        with open_parquet(file) as parquet:
            for number in range(parquet.num_row_groups):
                end = start + parquet.metadata.row_group(number).num_rows
                if not indices.isdisjoint(range(start, end)):
                    for batch in parquet.iter_batches(8192, row_groups=[number], columns=columns):
                        wanted = [index - start for index in sorted(indices) if start <= index < start + len(batch)]
                        yield from batch.take(pa.array(wanted, pa.int64())).to_pylist()
                        start += len(batch)
                start = end
