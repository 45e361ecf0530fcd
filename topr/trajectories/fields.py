"""Find the fields of a trajectory in a row of any format."""

import json
from pathlib import Path

import yaml
from jinja2.sandbox import SandboxedEnvironment

from topr.io import InputError
from topr.trajectories.rows import Row

FORMATS = yaml.safe_load(Path(__file__).with_name("formats.yaml").read_text())
FIELDS = FORMATS["fields"]
KEYS = FORMATS["message_keys"]
ROLES = FORMATS["roles"]
STEPS = "rewards of steps, as in PRM800K and Math-Shepherd, are not supported"


class Expressions(SandboxedEnvironment):
    """Jinja expressions in which a key of a list is the list of its items' values."""

    def getitem(self, obj, argument):
        if isinstance(obj, list) and isinstance(argument, str):
            return [self.getitem(item, argument) for item in obj]
        return super().getitem(obj, argument)

    getattr = getitem


def find_fields(row: Row, readers: dict) -> list[Row]:
    """The fields of a row, once for each response. Absent ones are None.

    Args:
        row: of any format.
        readers: compiled `Expressions`, by the field that they find.

    Raises:
        InputError: a response or a reward is missing, or lists differ in length.
    """
    # encoded, because half of a surrogate pair is no text
    text = json.dumps(row, default=str, ensure_ascii=False).encode()
    row = json.loads(text, object_hook=without_nulls)
    found = {name: read(row) for name, read in readers.items()}
    if found["response"] is None or found["reward"] is None:
        raise InputError(
            f"found the keys {', '.join(row):.200}; expected prompt, response, reward", STEPS
        )
    lists = {name: len(value) for name, value in found.items() if is_many(name, value)}
    lengths = {"response": 1, "reward": 1} | lists
    if len({*lengths.values()}) > 1:
        raise InputError(f"found lists of {lengths}, expected a reward for each response", STEPS)
    rows = []
    for place in range(lengths["reward"]):
        rows.append(found | {name: found[name][place] for name in lists})
    return rows


def without_nulls(part: Row) -> Row:
    """An object of JSON without the nulls that Parquet adds for the keys of others."""
    return {key: value for key, value in part.items() if value is not None}


def is_many(name: str, value) -> bool:
    """Whether a field has a value for each response. Messages are one value, as are token ids."""
    if not isinstance(value, list):
        return False
    return name in ("reward", "finished") or isinstance([*value, ""][0], (str, list))


def normalise_messages(messages):
    """Chat messages with the keys and the roles of chat templates; anything else as it is."""
    if not isinstance(messages, list):
        return messages
    turns = []
    for message in messages:
        turn = {KEYS.get(key, key): value for key, value in message.items()}
        role = turn.get("role")
        if role not in ROLES:
            raise InputError(f"unknown role {role!r}; expected {', '.join(ROLES)}")
        turns.append(turn | {"role": ROLES[role]})
    return turns
