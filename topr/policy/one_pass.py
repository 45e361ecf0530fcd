"""For speed only: log-probs, loss and gradient in one pass over the logits, each of which is computed once.

Shapes: see `logprobs.py`. This file can be deleted: `PolicyModule` then takes the same loss from all log-probs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from topr.batching import MicroBatch
from topr.losses import Loss, LossOutput
from topr.policy.logprobs import Head


@dataclass
class OnePass:
    """A loss whose value for a trajectory depends on that trajectory alone, with everything but the log-probs."""

    loss: Loss
    batch: MicroBatch
    scale_B: Tensor  # factors of the trajectories' losses

    def __call__(self, hidden_ND: Tensor, head: Head) -> tuple[Tensor, LossOutput, Tensor]:
        """The sum of the scaled losses, differentiable once; the loss's output, detached; hidden_ND. In chunks of whole
        trajectories, whose weights depend on all their log-probs; a longer one has its logits computed twice."""
        tokens, length_B = self.batch.tokens, self.batch.tokens.length_B
        weight_VD, bias_V, _ = head
        with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
            d_hidden_ND = torch.empty_like(hidden_ND)
            d_weight_VD: Any = torch.zeros_like(weight_VD) if weight_VD.requires_grad else None
            d_bias_V: Any = (
                torch.zeros_like(bias_V) if bias_V is not None and bias_V.requires_grad else None
            )
            total, outputs = torch.zeros_like(self.scale_B[0]), []
            # one buffer for all chunks: a CPU clears pages at their first use, which takes half as long as the product
            buffer_CV = weight_VD.new_empty(min(head.chunk, len(hidden_ND)), len(weight_VD))
            for part, pieces in _chunks(tokens.lengths, head.chunk):
                log_probs = []
                for piece in pieces:
                    chunk = _LogProbs(hidden_ND[piece], tokens.target_N[piece], head, buffer_CV)
                    log_probs.append(chunk.log_probs_C)
                log_probs_N = torch.cat(log_probs).requires_grad_()
                with torch.enable_grad():
                    ref_log_probs_N = self.batch.ref_log_probs_N[pieces[0].start : pieces[-1].stop]
                    output = self.loss(
                        log_probs_N, ref_log_probs_N, length_B[part], self.batch.advantage_B[part]
                    )
                    scaled = (output.loss_B * self.scale_B[part]).sum()
                (gradient_N,) = torch.autograd.grad(scaled, log_probs_N)
                for piece, gradient_C in zip(
                    pieces, gradient_N.split(list(map(len, log_probs))), strict=True
                ):
                    if len(pieces) > 1:
                        chunk = _LogProbs(hidden_ND[piece], tokens.target_N[piece], head, buffer_CV)
                    d_logits_CV = chunk.gradient(gradient_C)
                    d_hidden_ND[piece] = d_logits_CV @ weight_VD
                    if d_weight_VD is not None:
                        d_weight_VD.addmm_(d_logits_CV.T, hidden_ND[piece].to(weight_VD.dtype))
                    if d_bias_V is not None:
                        d_bias_V += d_logits_CV.sum(dim=0)
                total += scaled.detach()
                outputs.append([column.detach() for column in output])
        total = _KnownGradients.apply(
            total, (d_hidden_ND, d_weight_VD, d_bias_V), hidden_ND, weight_VD, bias_V
        )
        return total, LossOutput(*map(torch.cat, zip(*outputs, strict=True))), hidden_ND


class _KnownGradients(torch.autograd.Function):
    """A value whose gradients at its inputs were computed with it."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: tuple[Tensor | None, ...], *inputs: Tensor | None):
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_value):
        # the saved gradients belong to this call alone and are as large as the weights: scaled in place
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.mul_(d_value)
                for gradient in ctx.saved_tensors
            ),
        )


def _chunks(lengths: list[int], size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Trajectories whose logits are held together, and their positions, in pieces where one trajectory is longer."""
    first = start = end = 0
    for i, length in enumerate([*lengths, size + 1]):
        if end > start and end - start + length > size:
            yield (
                slice(first, i),
                [slice(at, min(at + size, end)) for at in range(start, end, size)],
            )
            first, start = i, end
        end += length


class _LogProbs:
    """log pi of a chunk's targets. The memory of the logits then holds their softmax, and at last their gradient."""

    def __init__(self, hidden_CD: Tensor, target_C: Tensor, head: Head, buffer_CV: Tensor):
        self.values_CV, self.slope_CV = head.logits(hidden_CD, buffer_CV[: len(hidden_CD)])
        self.target_C1 = target_C[:, None]
        target_C1, largest_C1 = (
            self.values_CV.gather(1, self.target_C1),
            self.values_CV.amax(dim=1, keepdim=True),
        )
        self.sum_C1 = self.values_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
        self.log_probs_C = (target_C1 - largest_C1 - self.sum_C1.log())[:, 0]

    def gradient(self, d_log_probs_C: Tensor) -> Tensor:
        """Gradient at the logits [C, V], (1 at the target - softmax) times that of log pi; call it once."""
        d_log_probs_C1 = d_log_probs_C[:, None]
        gradient_CV = self.values_CV.mul_(-d_log_probs_C1 / self.sum_C1)
        gradient_CV.scatter_add_(1, self.target_C1, d_log_probs_C1)
        return gradient_CV if self.slope_CV is None else gradient_CV.mul_(self.slope_CV)
