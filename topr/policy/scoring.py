"""Log mu of responses, by the forward that trains."""

from collections.abc import Sequence

import numpy as np
import torch

from topr.batching import pack, partition
from topr.policy.model import Policy


@torch.no_grad()
def score(
    policy: Policy,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    microbatch_tokens: int,
    sampled: Sequence[np.ndarray | None] = (),
) -> list[np.ndarray]:
    """log mu of the sampled tokens, a float32 array [T] for each response.

    Computed by the forward that trains, in rows of at most `microbatch_tokens` tokens.

    Args:
        policy: it scores.
        prompts: token ids.
        responses: token ids.
        microbatch_tokens: tokens of a row.
        sampled: which tokens of each response were sampled; see `pack`.
    """
    prompt_index: dict[bytes, int] = {}
    for ids in prompts:
        prompt_index.setdefault(ids.tobytes(), len(prompt_index))
    sizes = np.array(
        [
            [prompt_index[ids.tobytes()] for ids in prompts],
            [len(ids) for ids in prompts],
            [len(ids) for ids in responses],
        ]
    )
    scores: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for row in partition(sizes, microbatch_tokens, padded=policy.padded):
        tokens = pack(
            [prompts[i] for i in row],
            [responses[i] for i in row],
            [sampled[i] for i in row] if len(sampled) else (),
        )
        log_probs_N = policy.log_probs(tokens.to(policy.device))
        # the log-prob of a certain token can round to above 0
        log_probs_N = log_probs_N.clamp(max=0).float().cpu()
        for i, log_probs_T in zip(row, log_probs_N.split(tokens.lengths), strict=True):
            scores[i] = log_probs_T.numpy()
    return scores
