"""Log mu of trajectories, by the forward that trains."""

import numpy as np
import torch

from topr.batching import pack, partition
from topr.policy import Policy
from topr.trajectories.file import Trajectory


@torch.no_grad()
def add_log_probs(policy: Policy, trajectories: list[Trajectory], microbatch_tokens: int = 16384):
    """Set `ref_logprobs` of trajectories; 0 where not sampled.

    Args:
        policy: it scores.
        trajectories: they need ids and `sampled` only.
        microbatch_tokens: tokens of a row, which is one forward.
    """
    numbers: dict[tuple, int] = {}  # of the prompts
    sizes = []
    for t in trajectories:
        number = numbers.setdefault(tuple(t.prompt_ids), len(numbers))
        sizes.append([number, len(t.prompt_ids), len(t.response_ids)])
    for row in partition(np.array(sizes).T, microbatch_tokens, padded=policy.padded):
        chosen = [trajectories[i] for i in row]
        tokens = pack(
            [np.array(t.prompt_ids) for t in chosen],
            [np.array(t.response_ids) for t in chosen],
            [t.sampled and np.array(t.sampled) for t in chosen],
        )
        log_probs_N = policy.log_probs(tokens.to(policy.device)).float().cpu()
        # the log-prob of a certain token can round to above 0
        scores = log_probs_N.clamp(max=0).split(tokens.length_B.tolist())
        for t, places, log_probs_T in zip(chosen, tokens.sampled, scores, strict=True):
            ref_logprobs = np.zeros(len(t.response_ids))
            ref_logprobs[places] = log_probs_T
            t.ref_logprobs = ref_logprobs.tolist()
