"""Import of users' files into the trajectory format."""

from pathlib import Path

import numpy as np

from topr.io import InputError, load_jsonl
from topr.losses import advantage_share
from topr.policy import load_policy, load_tokenizer, policy_fingerprint, tokenizer_fingerprint
from topr.trajectories import Trajectory, add_log_probs, write_trajectories


def import_jsonl(path: str | Path, policy: str, out: str | Path, microbatch_tokens: int) -> list[Trajectory]:
    """Tokenise `{prompt, response, reward}` lines with the policy's tokenizer and score log mu with its forward.

    The prompt is tokenised with special tokens, the response without; `finished` (default true) appends the end
    token and trains it. Boolean rewards become +-1. `prompt_id`, `group`, `valid`, `answer` and `gold` are kept.

    Raises:
        InputError: a line is malformed, empty, or longer than the policy's context.
    """
    rows = load_jsonl(path, {"prompt": (str,), "response": (str,), "reward": (bool, int, float)})
    tokenizer, trajectories = load_tokenizer(policy), []
    ids: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        prompt_ids = tokenizer(row["prompt"])["input_ids"]
        finished = row.get("finished", True)
        if not isinstance(finished, bool):
            raise InputError(f"{path}, entry {number}: key 'finished' must hold true or false, found {finished!r}")
        response_ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        response_ids += [tokenizer.eos_token_id] if finished else []
        reward = float(row["reward"]) if not isinstance(row["reward"], bool) else 2.0 * row["reward"] - 1
        if not (prompt_ids and response_ids and np.isfinite(reward)):
            raise InputError(f"{path}, entry {number}: prompt, response or reward is empty or not finite")
        prompt_id = str(row.get("prompt_id", ids.setdefault(row["prompt"], str(len(ids)))))
        trajectories.append(
            Trajectory(
                prompt_id=prompt_id,
                group=str(row.get("group", prompt_id)),
                prompt=row["prompt"],
                prompt_ids=prompt_ids,
                response=row["response"],
                response_ids=response_ids,
                ref_logprobs=[],
                reward=reward,
                finished=finished,
                **{key: row.get(key) for key in ("valid", "answer", "gold")},
            )
        )
    model = load_policy(policy)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", microbatch_tokens)
    for number, trajectory in enumerate(trajectories, start=1):
        length = len(trajectory.prompt_ids) + len(trajectory.response_ids)
        if length > min(context, microbatch_tokens):
            raise InputError(
                f"{path}, entry {number}: {length} tokens are more than the policy's context of {context} or "
                f"--microbatch-tokens {microbatch_tokens}; drop the entry or raise the bound"
            )
    add_log_probs(model, trajectories, microbatch_tokens)
    metadata = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "policy": policy_fingerprint(policy),
        "precision": "32-true",
    }
    write_trajectories(out, trajectories, metadata)
    return trajectories


def report(trajectories: list[Trajectory]) -> str:
    """Counts, lengths, rewards and log-probs of trajectories, one line each."""
    reward = np.array([t.reward for t in trajectories])
    log_mu = np.array([sum(t.ref_logprobs) for t in trajectories])
    lines = [
        f"trajectories      {len(trajectories)} of {len({t.prompt_id for t in trajectories})} prompts, "
        f"{np.mean([t.finished for t in trajectories]):.1%} finished"
    ]
    for name in ("prompt_ids", "response_ids"):
        low, middle, high = np.quantile([len(getattr(t, name)) for t in trajectories], [0, 0.5, 1]).astype(int)
        lines.append(f"{name.removesuffix('_ids'):8}tokens    min {low}, median {middle}, max {high}")
    lines.append(
        f"reward            mean {reward.mean():.3f}; share >= 0: p = {(reward >= 0).mean():.3f}, "
        f"effective share at baseline 0: {advantage_share(reward):.3f}"
    )
    lines.append(f"log mu            mean {log_mu.mean():.1f}, min {log_mu.min():.1f}, max {log_mu.max():.1f}")
    return "\n".join(lines)
