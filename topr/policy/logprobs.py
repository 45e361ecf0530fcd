"""Log-probs of sampled tokens: hidden states of padded rows, and the output projection in chunks.

Shapes: N sampled tokens laid end to end, C of them in a chunk, L tokens of a row, B trajectories,
D hidden, V vocabulary.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from topr.batching import Tokens, seen_by

POSITIONS = {"cpu": 256, "cuda": 2048}  # whose logits exist at once
FEW_LOGITS = 2**22  # so many exist in any case


def token_log_probs(model, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
    """log softmax(logits) at the targets, [N], in the precision of the output projection.

    Autocast does not apply: in bfloat16 a log-prob would be wrong by about 0.04.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    weight_VD = model.get_output_embeddings().weight
    return TokenLogProbs.apply(hidden_ND, weight_VD, softcap, target_N)


class TokenLogProbs(torch.autograd.Function):
    """Log-probs of N targets that never holds the logits of more than one chunk of positions.

    All chunks use one buffer, because a CPU clears new memory at its first use. The backward takes
    the last chunk from this buffer and computes the logits of the others again.
    """

    @staticmethod
    def forward(
        ctx, hidden_ND: Tensor, weight_VD: Tensor, softcap: float | None, target_N: Tensor
    ) -> Tensor:
        log_probs_N = weight_VD.new_empty(len(target_N))
        chunks = position_chunks(len(target_N), weight_VD)
        buffer_CV = weight_VD.new_empty(len(target_N[chunks[-1]]), len(weight_VD))
        for chunk in chunks:
            log_softmax_CV, slope_CV = log_softmax(hidden_ND[chunk], weight_VD, softcap, buffer_CV)
            log_probs_N[chunk] = log_softmax_CV.gather(1, target_N[chunk, None])[:, 0]
        ctx.save_for_backward(hidden_ND, weight_VD, target_N)
        ctx.softcap = softcap
        ctx.last_chunk = (log_softmax_CV, slope_CV)
        return log_probs_N

    @staticmethod
    @once_differentiable
    def backward(ctx, d_log_probs_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N = ctx.saved_tensors
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_weight_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        log_softmax_CV, slope_CV = ctx.last_chunk
        ctx.last_chunk = None  # a second backward fails: the buffer is overwritten
        buffer_CV = log_softmax_CV
        chunks = position_chunks(len(target_N), weight_VD)
        for chunk in reversed(chunks):
            if chunk != chunks[-1]:
                log_softmax_CV, slope_CV = log_softmax(
                    hidden_ND[chunk], weight_VD, ctx.softcap, buffer_CV
                )
            # d log pi(target) / d logits = (1 at the target) - softmax. Here its negative, in
            # the buffer; the sign and the incoming gradient are applied to smaller tensors.
            d_logits_CV = log_softmax_CV.exp_()
            target_C1 = target_N[chunk, None]
            d_logits_CV.scatter_add_(1, target_C1, d_logits_CV.new_full(target_C1.shape, -1))
            if slope_CV is not None:
                d_logits_CV.mul_(slope_CV)
            scale_C1 = -d_log_probs_N[chunk, None]
            with torch.autocast(weight_VD.device.type, enabled=False):
                d_hidden_ND[chunk] = scale_C1 * (d_logits_CV @ weight_VD)
                if d_weight_VD is not None:
                    d_weight_VD.addmm_(d_logits_CV.T, scale_C1 * hidden_ND[chunk])
        return d_hidden_ND, d_weight_VD, None, None


def position_chunks(positions: int, weight_VD: Tensor) -> list[slice]:
    """Equal chunks of positions. The first one can be smaller: the last one is not recomputed."""
    size = max(POSITIONS[weight_VD.device.type], FEW_LOGITS // len(weight_VD))
    edges = [0, *range(positions % size or size, positions, size), positions]
    return [slice(start, end) for start, end in pairwise(edges)]


def log_softmax(
    hidden_CD: Tensor, weight_VD: Tensor, softcap: float | None, buffer_CV: Tensor
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits) in the buffer, and the derivative of their soft cap if there is one.

    The soft cap (Gemma) replaces each logit by softcap * tanh(logit / softcap).
    """
    buffer_CV = buffer_CV[: len(hidden_CD)]
    slope_CV = None
    with torch.autocast(weight_VD.device.type, enabled=False):
        logits_CV = torch.mm(hidden_CD.to(weight_VD.dtype), weight_VD.T, out=buffer_CV)
        if softcap is not None:
            logits_CV.div_(softcap).tanh_()
            slope_CV = 1 - logits_CV.square()
            logits_CV.mul_(softcap)
        # one pass over each row; `logsumexp` would need a second buffer
        torch.log_softmax(logits_CV, dim=1, out=logits_CV)
    return logits_CV, slope_CV


def padded_hidden_states(model, tokens: Tokens) -> Tensor:
    """Hidden states that predict the sampled tokens, [N, D], from one padded row a trajectory."""
    rows = [from_numpy(seen_by(span)) for span in tokens.trajectories]
    place_BL = pad_sequence(rows, batch_first=True)
    device = tokens.input_ids_L.device
    input_ids_BL = tokens.input_ids_L[place_BL.to(device, non_blocking=True)]
    hidden_BLD = model.get_decoder()(input_ids_BL, use_cache=False).last_hidden_state
    columns = place_BL.shape[1]
    position_N = []
    for row, (_, _, first, last) in enumerate(tokens.trajectories):
        position_N.append(row * columns + last - first - 1 + tokens.sampled[row])
    positions = from_numpy(np.concatenate(position_N)).to(device, non_blocking=True)
    return hidden_BLD.flatten(0, 1).index_select(0, positions)
