"""Claim 8: a verifier that TOPR trains on its own critiques."""

import pandas as pd

from data.claims.study import Found, Study, over_seeds, row

SHOWN = ["accuracy", "invalid", "maj@8", "weighted@8"]


def verifier(study: Study) -> Found:
    """A verifier before and after training, at the rate of TOPR on the arithmetic itself."""
    runs, tuning = study.tuned(["TOPR"])
    run = {"rate": runs["TOPR"]["rate"], "steps": study.setting["verifier_steps"]}
    results = study.run("verify", {"verifier": run}, study.seeds)["verifier"]
    before = pd.DataFrame([result["before"] for result in results])
    after = pd.DataFrame([result["after"] for result in results])
    votes = {}
    for k in (4, 8):
        votes[f"@{k}"] = over_seeds(after[f"weighted@{k}"] - after[f"maj@{k}"])
    changes = {"after minus before": row(after - before), "after: weighted minus majority": votes}
    figure = {"before": row(before[SHOWN]), "after": row(after[SHOWN])}
    return Found({"before": row(before), "after": row(after)}, changes, tuning, figure)
