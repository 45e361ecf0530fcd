"""Log mu of trajectories, by the forward that trains."""

import numpy as np
import torch

from topr.batching import pack, partition
from topr.io import InputError
from topr.policy import Policy
from topr.sampling import Sampling
from topr.trajectories.file import Trajectory

LIMIT = 0.005  # nats a token; bfloat16 against float32 makes .001, a temperature of .7 makes .008


def score(
    policy: Policy,
    trajectories: list[Trajectory],
    sampling: Sampling,
    microbatch_tokens: int = 16384,
):
    """`add_log_probs` to fresh responses, and compare with the log-probs of the server that sampled
    them, if any. Their mean difference is the KL divergence of what it samples from the policy.

    Raises an InputError beyond `LIMIT`. A temperature, top_p or a small top_k changes the log-probs
    of some servers: then nothing is compared.
    """
    gaps = add_log_probs(policy, trajectories, microbatch_tokens)
    if not gaps or (sampling.temperature, sampling.top_p) != (1, 1) or 0 < sampling.top_k < 100:
        return
    difference = np.concatenate(gaps).mean()
    print(f"log-probs of the server exceed the policy's by {difference:z.4f} a token on average")
    if not abs(difference) < LIMIT:
        raise InputError(
            f"the server samples from another distribution than policy {policy.name!r}: its "
            f"log-probs differ by {difference:.3f} a token, more than {LIMIT}",
            "start it with this policy; configs/README.md has the arguments",
        )


@torch.no_grad()
def add_log_probs(
    policy: Policy, trajectories: list[Trajectory], microbatch_tokens: int = 16384
) -> list[np.ndarray]:
    """Set `ref_logprobs` of trajectories; 0 where not sampled.

    Args:
        policy: it scores.
        trajectories: they need ids and `sampled` only.
        microbatch_tokens: tokens of a row, which is one forward.

    Returns:
        By how much `ref_logprobs` were larger before, of each trajectory that had them.
    """
    gaps = []
    numbers: dict = {}  # of the prompts
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
            if t.ref_logprobs:
                gaps.append(t.ref_logprobs - ref_logprobs)
            t.ref_logprobs = ref_logprobs.tolist()
    return gaps
