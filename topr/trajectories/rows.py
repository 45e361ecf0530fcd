"""Load and check the rows of users' files: JSON lines, Parquet, data sets of the hub."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from topr.io import InputError, explained

Row = dict
Types = dict[str, tuple[type, ...]]  # the accepted types of each key


def load_rows(source: str | Path, types: Types) -> list[Row]:
    """Rows of a file or a hub data set, with checked types.

    Args:
        source: JSON lines (also .gz and .zst), Parquet, or `owner/name[/config]:split` on the hub.
        types: of keys; those of a key that may be absent or null include `NoneType`. `a|b|c` is one
            key that data sets call differently: rows get the first of these that they hold as `a`.

    Raises:
        InputError: if the source cannot be read or is empty, or a key is absent or mistyped.
    """
    with explained(
        f"{source} cannot be read",
        remedy="give JSON lines (.gz, .zst), Parquet or a hub data set owner/name[/config]:split",
    ):
        rows = _read(str(source))
    if not rows:
        raise InputError(f"{source} holds no row")
    for number, row in enumerate(rows, start=1):
        for names, accepted in types.items():
            key, *others = names.split("|")
            for other in others:
                if other in row:
                    row.setdefault(key, row[other])
            value = row.get(key)
            if type(value) not in accepted:  # isinstance takes a boolean for an int
                expected = " or ".join(kind.__name__ for kind in accepted)
                raise InputError(
                    f"{source}, row {number}: key {names!r} holds {value!r:.40}, "
                    f"expected {expected}"
                )
    return rows


def _read(source: str) -> list[Row]:
    name, _, split = source.partition(":")
    if split and not Path(source).exists():
        import datasets

        owner, repository, *configuration = name.split("/")
        name = f"{owner}/{repository}"
        return datasets.load_dataset(name, *configuration, split=split).to_list()
    if source.endswith(".parquet"):
        return pq.read_table(source, page_checksum_verification=True).to_pylist()
    with pa.input_stream(source) as stream:  # decompresses by the file's name
        text = stream.read().decode("utf-8-sig")
    lines = text.split("\n")  # not splitlines: a string may hold U+2028
    return [{**json.loads(line)} for line in lines if line.strip()]  # an error if no object
