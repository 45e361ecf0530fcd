"""Sample and grade with the policy that a module holds, be it in training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pandas as pd
import torch

from topr.evaluation.metrics import per_problem, summarise
from topr.io.distributed import Preempted, gather, stop_requested
from topr.policy.sharding import full_weights
from topr.sampling.local import LocalSampler
from topr.trajectories.file import Trajectory, write_trajectories
from topr.trajectories.scoring import score

if TYPE_CHECKING:
    from topr.datamodule import ProblemBatch
    from topr.module import PolicyModule


def sample_and_grade(module: "PolicyModule", batch: "ProblemBatch") -> list[Trajectory]:
    """Graded responses to this rank's problems, without log mu.

    Raises:
        Preempted: a rank was asked to stop.
    """
    sampler = module.sampler
    if sampler is None or not sampler.in_process:  # a server does not hold the weights in training
        sampler = LocalSampler()
    with sampling_context(module):
        trajectories = next(batch.job.sample_parts([batch.numbers], sampler, module.policy))
    if any(gather(stop_requested.is_set())):
        raise Preempted
    return trajectories


def predict(module: "PolicyModule", batch: "ProblemBatch") -> list[Trajectory]:
    """Graded responses with log mu, also in the file that the batch names, if any."""
    with sampling_context(module):
        if not batch.numbers:  # this rank only keeps the others company
            return []
        trajectories = next(batch.sampled)
        score(module.policy, trajectories, batch.job.sampling, batch.microbatch_tokens)
    if batch.path:
        write_trajectories(batch.path, trajectories, batch.job.metadata)
    return trajectories


def metrics_of_all_ranks(batch: "ProblemBatch", trajectories: list[Trajectory]) -> dict:
    """Metrics over the problems of all ranks: means with intervals."""
    values = per_problem(trajectories, [batch.job.samples])
    values.index = batch.numbers
    return summarise(pd.concat(gather(values)).sort_index())


@contextmanager
def sampling_context(module: "PolicyModule") -> Iterator[None]:
    """Full weights in the precision of training, without gradients."""
    policy = module.policy
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        full_weights(policy),
        # each weight is cast once; by Lightning's own autocast it would be for every token
        torch.autocast(
            module.device.type,
            torch.bfloat16,
            module.trainer.precision == "bf16-mixed",
            cache_enabled=True,
        ),
    ):
        # autocast caches only copies of weights that require gradients, so those under adapters do
        # for the moment
        frozen = [weight for weight in policy.parameters() if not weight.requires_grad]
        policy.requires_grad_(True)
        policy.eval()  # in training, activation checkpointing drops the cache of keys and values
        try:
            yield
        finally:
            policy.train()
            for weight in frozen:
                weight.requires_grad_(False)
