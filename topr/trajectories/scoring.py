"""Log mu of trajectories, scored by a policy."""

import numpy as np

from topr.policy import Policy, score
from topr.trajectories.file import Trajectory


def add_log_probs(policy: Policy, trajectories: list[Trajectory], microbatch_tokens: int) -> None:
    """Set `ref_logprobs` of trajectories, by the forward that trains; 0 where not sampled."""
    prompts = [np.array(trajectory.prompt_ids) for trajectory in trajectories]
    responses = [np.array(trajectory.response_ids) for trajectory in trajectories]
    sampled = []
    for trajectory in trajectories:
        sampled.append(np.array(trajectory.sampled or [True] * len(trajectory.response_ids)))
    scores = score(policy, prompts, responses, microbatch_tokens, sampled)
    for trajectory, marks, log_probs in zip(trajectories, sampled, scores, strict=True):
        ref_logprobs = np.zeros(len(marks), dtype=np.float32)
        ref_logprobs[marks] = log_probs
        trajectory.ref_logprobs = ref_logprobs.tolist()
