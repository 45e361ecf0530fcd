"""Report on trajectory files: origin, counts, lengths, rewards, log-probs, samples."""

from collections.abc import Iterator

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from topr.io import printable
from topr.losses import advantage_share
from topr.trajectories.file import METADATA_KEYS, SCHEMA, batches, read_metadata


def report(files: list[str]) -> str:
    """Report on trajectory files, read as one set in batches; raises InputError for a bad file or row."""
    metadata = [read_metadata(file) for file in files]
    rows = pd.concat([_numbers(table) for file in files for table in batches(file)], ignore_index=True)
    positive, cut, valid = rows.reward >= 0, ~rows.finished, rows.valid.dropna()
    rate, share = positive.groupby(rows.group).mean(), advantage_share(rows.reward.to_numpy())
    facts = {
        **{key: " | ".join(dict.fromkeys(str(entry[key]) for entry in metadata)) for key in METADATA_KEYS},
        "trajectories": f"{len(rows):,} of {rows.prompt_id.nunique():,} prompts in {len(files):,} file(s)",
        "not finished": f"{cut.sum():,} ({cut.mean():.1%})",
        "invalid": f"{1 - valid.mean():.1%} of {len(valid):,} graded" if len(valid) else "not recorded",
        "reward >= 0": f"{positive.mean():.1%}, effective share at baseline 0: {share:.1%}",
        "groups": f"{len(rate)}, {rate.between(0, 1, 'neither').sum()} with both signs, {rate.eq(0).sum()} negative",
        "log mu": f"{rows.log_mu.sum() / rows.response_tokens.sum():.3f} per token",
    }
    tables = [rows.describe(percentiles=[0.5, 0.95]).T.drop(columns="count").to_string(float_format="{:,.4g}".format)]
    sign = positive.map({True: "positive", False: "negative"}).rename("")
    for values in [rows.response_tokens] + [rows.reward] * (not set(rows.reward) <= {-1, 1}):
        ranges = pd.cut(values, 10, precision=1) if values.nunique() > 10 else values
        tables.append(pd.crosstab(ranges, sign).to_string())
    return "\n\n".join(["\n".join(f"{key:<13} {fact}" for key, fact in facts.items()), *tables])


def _numbers(table: pa.Table) -> pd.DataFrame:
    """What the report needs of each row."""
    prompt, response = (pc.list_value_length(table[name]).to_numpy() for name in ("prompt_ids", "response_ids"))
    rows = table.select(["prompt_id", "group", "reward", "finished", "valid"]).to_pandas()
    log_mu = table["ref_logprobs"].to_pandas().map(lambda log_probs: log_probs.sum())
    return rows.assign(prompt_tokens=prompt, response_tokens=response, log_mu=log_mu)


def samples(files: list[str], count: int) -> Iterator[str]:
    """The first `count` positives and negatives of trajectory files, as text."""
    for sign, rows in (("positive", pc.field("reward") >= 0), ("negative", pc.field("reward") < 0)):
        for row in ds.dataset(files, schema=SCHEMA).head(count, filter=rows).to_pylist():
            facts = ", ".join(f"{key} {row[key]}" for key in ("reward", "finished", "valid", "answer", "gold"))
            prompt, response = (printable(row[name], 800, kept="\n\t") for name in ("prompt", "response"))
            yield f"--- {sign}: {printable(facts, 200)}\n[prompt]\n{prompt}\n[response]\n{response}"
