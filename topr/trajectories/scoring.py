"""Log mu of trajectories, by the forward that trains."""

import numpy as np
import torch

from topr.batching import pack, partition
from topr.policy import Policy
from topr.trajectories.file import Trajectory


@torch.no_grad()
def add_log_probs(policy: Policy, trajectories: list[Trajectory], microbatch_tokens: int) -> None:
    """Set `ref_logprobs` of trajectories; 0 where not sampled.

    Args:
        policy: it scores.
        trajectories: they need ids and `sampled` only.
        microbatch_tokens: tokens of a row, which is one forward.
    """
    prompts = [np.array(trajectory.prompt_ids) for trajectory in trajectories]
    responses = [np.array(trajectory.response_ids) for trajectory in trajectories]
    sampled = []
    for trajectory in trajectories:
        sampled.append(np.array(trajectory.sampled or [True] * len(trajectory.response_ids)))
    numbers: dict[bytes, int] = {}
    prompt_number = [numbers.setdefault(ids.tobytes(), len(numbers)) for ids in prompts]
    sizes = np.array([prompt_number, list(map(len, prompts)), list(map(len, responses))])
    for row in partition(sizes, microbatch_tokens, padded=policy.padded):
        tokens = pack(
            [prompts[i] for i in row], [responses[i] for i in row], [sampled[i] for i in row]
        )
        log_probs_N = policy.log_probs(tokens.to(policy.device))
        # the log-prob of a certain token can round to above 0
        log_probs_N = log_probs_N.clamp(max=0).float().cpu()
        for i, log_probs_T in zip(row, log_probs_N.split(tokens.lengths), strict=True):
            ref_logprobs = np.zeros(len(responses[i]), dtype=np.float32)
            ref_logprobs[sampled[i]] = log_probs_T
            trajectories[i].ref_logprobs = ref_logprobs.tolist()
