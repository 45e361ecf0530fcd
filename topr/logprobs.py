"""Log-probabilities of response tokens: no padding, a prompt once for all its responses, no logits kept.

Shapes: B trajectories, L tokens of the row that holds them, N response tokens laid end to end, C of a chunk of them,
D hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from topr.attention import NAME, Spans
from topr.losses import Loss, LossOutput
from topr.packing import Tokens, pack, partition

# logits held at once: 256 positions of a 128k vocabulary on a CPU, 2,048 on a GPU, whose products want more rows
CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**28}


def response_log_probs(model: nn.Module, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """log pi of each response token and the hidden states that predict them.

    Args:
        model: a Hugging Face causal language model.
        tokens: the trajectories.

    Returns:
        log_probs_N, float32 (float64 for a float64 model) at temperature 1 over the full vocabulary; hidden_ND.
    """
    hidden_ND = _hidden(model, tokens)
    return token_log_probs(hidden_ND, *_head(model), tokens.target_N), hidden_ND


def response_loss(
    model: nn.Module, tokens: Tokens, loss: Loss, ref_log_probs_N: Tensor, advantage_B: Tensor, scale_B: Tensor
) -> tuple[Tensor, LossOutput, Tensor]:
    """A loss and, with it, its gradient at the hidden states and the output projection, of each logit computed once.

    Args:
        model: a Hugging Face causal language model.
        tokens: the trajectories.
        loss: one whose value for a trajectory depends on that trajectory alone.
        ref_log_probs_N: log mu.
        advantage_B: A.
        scale_B: factors of the trajectories' losses.

    Returns:
        Sum of the scaled losses, differentiable once; what the loss says of each trajectory, detached; hidden_ND.
    """
    hidden_ND = _hidden(model, tokens)

    def evaluate(log_probs_N: Tensor, trajectories: slice, positions: slice) -> LossOutput:
        return loss(log_probs_N, ref_log_probs_N[positions], tokens.length_B[trajectories], advantage_B[trajectories])

    total, *output = OnePassLoss.apply(hidden_ND, *_head(model), tokens.target_N, tokens.lengths, evaluate, scale_B)
    return total, LossOutput(*output), hidden_ND


def _hidden(model: nn.Module, tokens: Tokens) -> Tensor:
    """Hidden states that predict the response tokens, [N, D]."""
    decoder = model.get_decoder()
    if model.config.get_text_config()._attn_implementation == NAME:
        nothing = tokens.input_ids_L.new_empty(1, 1, 0, 0)  # a mask of four dimensions, which models pass on as it is
        hidden_1LD = decoder(
            tokens.input_ids_L[None],
            attention_mask=nothing,
            position_ids=tokens.position_ids_L[None],
            spans=Spans(tokens.spans),
            use_cache=False,
        ).last_hidden_state
        return hidden_1LD[0].index_select(0, tokens.position_N)
    # one padded row a trajectory; causal attention keeps the pads on the right out of every real token
    rows = [np.r_[first:last, start:end] for start, end, first, last in tokens.trajectories]
    columns = max(map(len, rows))
    ends = [i * columns + len(row) - 1 for i, row in enumerate(rows)]
    position_N = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, tokens.lengths, strict=True)])
    place_BL = pad_sequence([from_numpy(row) for row in rows], batch_first=True)
    input_ids_BL = tokens.input_ids_L[place_BL.to(tokens.input_ids_L.device)]
    hidden_BLD = decoder(input_ids_BL, use_cache=False).last_hidden_state
    return hidden_BLD.flatten(0, 1).index_select(0, from_numpy(position_N).to(hidden_BLD.device))


def _head(model: nn.Module) -> tuple[Tensor, Tensor | None, float | None]:
    """Weight and bias of the output projection, and the soft cap of the logits (Gemma)."""
    head = model.get_output_embeddings()
    return head.weight, head.bias, getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def token_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None, target_N: Tensor
) -> Tensor:
    """log softmax(hidden @ weight^T + bias) at the targets, [N], in chunks of positions recomputed in the backward."""

    def chunk_log_probs(hidden_CD: Tensor, target_C: Tensor) -> Tensor:
        return -F.cross_entropy(_logits(hidden_CD, weight_VD, bias_V, softcap)[0], target_C, reduction="none")

    chunks = zip(hidden_ND.split(_chunk(weight_VD)), target_N.split(_chunk(weight_VD)), strict=True)
    return torch.cat([checkpoint(chunk_log_probs, hidden, target, use_reentrant=False) for hidden, target in chunks])


def _chunk(weight_VD: Tensor) -> int:
    """Positions whose logits are held at once."""
    return max(64, CHUNK_LOGITS[weight_VD.device.type] // len(weight_VD))


def _chunks(lengths: list[int], size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Trajectories whose logits are held together, and their positions, in pieces where one trajectory is longer."""
    first = start = end = 0
    for i, length in enumerate([*lengths, size + 1]):
        if end > start and end - start + length > size:
            yield slice(first, i), [slice(at, min(at + size, end)) for at in range(start, end, size)]
            first, start = i, end
        end += length


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None, out_CV: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits, in the weight's precision as in bfloat16 they err by .04 a token, and the slope of their soft cap."""
    with torch.autocast(hidden_CD.device.type, enabled=False):
        logits_CV = torch.mm(hidden_CD.to(weight_VD.dtype), weight_VD.T, out=out_CV)
        if bias_V is not None:
            logits_CV += bias_V
        if softcap is None:
            return logits_CV, None
        capped_CV = torch.tanh(logits_CV / softcap)
        return softcap * capped_CV, 1 - capped_CV.square()


class _LogProbs:
    """log pi of a chunk's targets; the logits' memory then holds their softmax, and at last their gradient."""

    def __init__(self, hidden_CD: Tensor, target_C: Tensor, head: tuple, buffer_CV: Tensor):
        self.values_CV, self.slope_CV = _logits(hidden_CD, *head, buffer_CV[: len(hidden_CD)])
        self.target_C1 = target_C[:, None]
        target_C1, largest_C1 = self.values_CV.gather(1, self.target_C1), self.values_CV.amax(dim=1, keepdim=True)
        self.sum_C1 = self.values_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
        self.found_C = (target_C1 - largest_C1 - self.sum_C1.log())[:, 0]

    def gradient(self, d_log_probs_C: Tensor) -> Tensor:
        """Gradient at the logits [C, V], to be asked for once: (1 at the target - softmax) times that of log pi."""
        d_log_probs_C1 = d_log_probs_C[:, None]
        gradient_CV = self.values_CV.mul_(-d_log_probs_C1 / self.sum_C1)
        gradient_CV.scatter_add_(1, self.target_C1, d_log_probs_C1)
        return gradient_CV if self.slope_CV is None else gradient_CV.mul_(self.slope_CV)


class OnePassLoss(torch.autograd.Function):
    """Log-probs, the loss and its gradient at hidden states and weights, chunk by chunk of whole trajectories.

    A trajectory's weight depends on all its log-probs; one longer than a chunk has its logits computed twice.
    """

    @staticmethod
    def forward(ctx, hidden_ND, *arguments):
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return OnePassLoss._forward(ctx, hidden_ND, *arguments)

    @staticmethod
    def _forward(ctx, hidden_ND, weight_VD, bias_V, softcap, target_N, length_B, evaluate, scale_B):
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_weight_VD = torch.zeros_like(weight_VD) if needs_weight else None
        d_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        total, outputs, head = torch.zeros_like(scale_B[0]), [], (weight_VD, bias_V, softcap)
        # one for all chunks: a CPU's pages are cleared when they are first touched, half as long as the product takes
        buffer_CV = weight_VD.new_empty(min(_chunk(weight_VD), len(hidden_ND)), len(weight_VD))
        for trajectories, pieces in _chunks(length_B, _chunk(weight_VD)):
            log_probs = []
            for piece in pieces:
                chunk = _LogProbs(hidden_ND[piece], target_N[piece], head, buffer_CV)
                log_probs.append(chunk.found_C)
            log_probs_N = torch.cat(log_probs).requires_grad_()
            with torch.enable_grad():
                output = evaluate(log_probs_N, trajectories, slice(pieces[0].start, pieces[-1].stop))
                scaled = (output.loss_B * scale_B[trajectories]).sum()
            (gradient_N,) = torch.autograd.grad(scaled, log_probs_N)
            for piece, gradient_C in zip(pieces, gradient_N.split([len(found) for found in log_probs]), strict=True):
                if len(pieces) > 1:
                    chunk = _LogProbs(hidden_ND[piece], target_N[piece], head, buffer_CV)
                d_logits_CV = chunk.gradient(gradient_C)
                d_hidden_ND[piece] = d_logits_CV @ weight_VD
                if needs_weight:
                    d_weight_VD.addmm_(d_logits_CV.T, hidden_ND[piece].to(weight_VD.dtype))
                if needs_bias:
                    d_bias_V += d_logits_CV.sum(dim=0)
            total += scaled.detach()
            outputs.append([column.detach() for column in output])
        ctx.save_for_backward(d_hidden_ND, d_weight_VD, d_bias_V)
        columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
        ctx.mark_non_differentiable(*columns)
        return total, *columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total, *_):
        # they are this call's own, and of the size of the weights: scaled in place
        gradients = (None if gradient is None else gradient.mul_(d_total) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None, None


@torch.no_grad()
def score(
    model: nn.Module, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], microbatch_tokens: int
) -> list[np.ndarray]:
    """log mu of every response, float32 arrays in the order given, by the very forward that trains."""
    device = next(model.parameters()).device
    number: dict[bytes, int] = {}
    prompt = [number.setdefault(ids.tobytes(), len(number)) for ids in prompts]
    sizes = np.array([prompt, [len(ids) for ids in prompts], [len(ids) for ids in responses]])
    scores: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for row in partition(sizes, microbatch_tokens):
        tokens = pack([prompts[i] for i in row], [responses[i] for i in row])
        log_probs_N, _ = response_log_probs(model, tokens.to(device))
        # a certain token's log-prob can round to a little above 0
        log_probs_N = log_probs_N.clamp(max=0).float().cpu()
        for i, log_probs_T in zip(row, log_probs_N.split(tokens.length_B.tolist()), strict=True):
            scores[i] = log_probs_T.numpy()
    return scores
