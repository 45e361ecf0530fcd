"""The families of models in README.md: each trains, and computes prompts as the table says."""

import json
import re

import pytest
from conftest import ROOT
from test_importing import imported
from test_logprobs import FAMILIES, PADDED, make_policy_of
from test_update import fit, movement

from data.arithmetic.imitation import make_tokenizer
from topr.policy import export_policy, load_policy

README = (ROOT / "README.md").read_text("utf-8")
TABLE = re.search(r"^\| share prompts \| padded \|\n.*\n\| (.+) \| (.+) \|$", README, re.MULTILINE)
SHARING, PADDING = (column.split(", ") for column in TABLE.groups())
CLASSES = {family.lower(): family for family in FAMILIES | PADDED}
RESPONSES = [
    {"prompt": prompt, "response": response, "reward": len(response) % 2 == 0}
    for prompt in ("1+1>", "12*(3-1)>")
    for response in ("2", "11", "1+1=2", "12*2=24", "1+1=12")
]


def class_of(name: str) -> str:
    """`GPTNeoX` for GPT-NeoX, as transformers writes it."""
    return CLASSES[re.sub(r"\(.*|\W", "", name).lower()]


def test_the_readme_lists_each_family_that_is_tested_once():
    assert sorted(map(class_of, SHARING + PADDING)) == sorted(CLASSES.values())


@pytest.mark.filterwarnings("ignore:.*trajectories are padded")
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING + PADDING)
def test_a_family_is_imported_and_trained(run, name):
    policy = make_policy_of(class_of(name))
    policy.tokenizer = make_tokenizer()
    export_policy(policy, run.folder / "base")
    assert load_policy(str(run.folder / "base")).padded == (name in PADDING)
    imported(run, run.folder / "base", RESPONSES)
    folder = fit(
        run, run.folder / "base", "a.parquet", "--data.batch_size=5", "--trainer.callbacks=null"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["max_abs_log_ratio_at_start"] < 1e-4
    moved = {
        weight: change.abs().max()
        for weight, change in movement(run.folder / "base", folder).items()
    }
    # by Adam, at a rate of 3e-4; a bias of the keys alone has no gradient
    assert [
        weight
        for weight, most in moved.items()
        if most < 1e-4 and not weight.endswith("k_proj.bias")
    ] == []
