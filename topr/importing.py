"""Import of users' files into the trajectory format."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topr.io import InputError, load_rows
from topr.policy import load_policy, load_tokenizer, provenance, vocabulary_and_context
from topr.trajectories import Trajectory, add_log_probs, write_trajectories

REQUIRED = {"prompt": (str,), "response": (str,), "reward": (bool, int, float)}
OPTIONAL = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "valid": (bool,),
    "answer": (str, int, float),
    "gold": (str, int, float),
}


def import_jsonl(
    path: str | Path, policy: str, out: str | Path, microbatch_tokens: int, precision: str = "32-true"
) -> list[Trajectory]:
    """Tokenise `{prompt, response, reward}` lines with the policy's tokenizer and score log mu with its forward.

    The prompt is tokenised with special tokens, the response without; `finished` (default true) appends the end
    token and trains it. Boolean rewards become +-1. The keys of `OPTIONAL` are kept.

    Args:
        path: JSON lines.
        policy: the policy that sampled the responses, folder or hub name.
        out: trajectory file to write.
        microbatch_tokens: tokens of one forward.
        precision: 32-true or bf16-mixed, of the scoring forward; best that of the training to come.

    Raises:
        InputError: a line is malformed, empty, or longer than the policy's context.
    """
    rows, tokenizer = load_rows(path, REQUIRED, OPTIONAL), load_tokenizer(policy)
    context = min(microbatch_tokens, vocabulary_and_context(policy)[1])
    own = {prompt: f"prompt-{i}" for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    trajectories = []
    for number, row in enumerate(rows, start=1):
        trajectory = _trajectory(row, own[row["prompt"]], tokenizer)
        length = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        for name in ("prompt_ids", "response_ids"):
            if not getattr(trajectory, name):
                raise InputError(f"{path}, entry {number}: the {name.removesuffix('_ids')} is empty; drop the entry")
        if not np.isfinite(np.float32(trajectory.reward)):
            raise InputError(f"{path}, entry {number}: the reward {trajectory.reward} is not finite in float32")
        if length > context:
            raise InputError(
                f"{path}, entry {number}: {length} tokens are more than the policy's context or --microbatch-tokens "
                f"allow ({context}); drop the entry or raise the bound"
            )
        trajectories.append(trajectory)
    if ignored := sorted({key for row in rows for key in row} - {*REQUIRED, *OPTIONAL}):
        warnings.warn(f"{path}: keys that mean nothing here are ignored: {', '.join(ignored)}", stacklevel=2)
    unknown = sum(tokenizer.unk_token_id in t.prompt_ids + t.response_ids for t in trajectories)
    if unknown:
        warnings.warn(f"{path}: {unknown} entries hold text that the tokenizer does not know", stacklevel=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_policy(policy).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        add_log_probs(model, trajectories, microbatch_tokens)
    write_trajectories(out, trajectories, provenance(policy, tokenizer, precision))
    return trajectories


def _trajectory(row: dict[str, Any], prompt_id: str, tokenizer) -> Trajectory:
    """One line, tokenised; absent and null keys are the same."""
    given = {key: row[key] for key in OPTIONAL if row.get(key) is not None}
    finished, prompt_id = given.get("finished", True), str(given.get("prompt_id", prompt_id))
    end = [tokenizer.eos_token_id] if finished else []
    return Trajectory(
        prompt_id=prompt_id,
        group=str(given.get("group", prompt_id)),
        prompt=row["prompt"],
        prompt_ids=tokenizer(row["prompt"])["input_ids"],
        response=row["response"],
        response_ids=tokenizer(row["response"], add_special_tokens=False)["input_ids"] + end,
        ref_logprobs=[],
        reward=2.0 * row["reward"] - 1 if isinstance(row["reward"], bool) else float(row["reward"]),
        finished=finished,
        valid=given.get("valid"),
        **{key: str(given[key]) for key in ("answer", "gold") if key in given},
    )
