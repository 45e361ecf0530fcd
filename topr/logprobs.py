"""Log-probabilities of response tokens, without materialising logits and without an attention mask.

Shapes: B trajectories, L columns of a padded batch, N response tokens laid end to end, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**26  # logits held at once: 512 positions of a 128k vocabulary, every position of a tiny one


class Tokens(NamedTuple):
    """A right-padded batch of prompts with their responses.

    Causal attention keeps the pads on the right out of every real token, so no mask is needed.
    """

    input_ids_BL: Tensor
    position_N: Tensor  # index into the B*L flat columns of the column that predicts each response token
    target_N: Tensor  # the response tokens
    length_B: Tensor  # response tokens of each trajectory
    real: int  # tokens that are no padding

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(*(field.to(device) if isinstance(field, Tensor) else field for field in self))


def pad(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Tokens:
    """Lay B prompts and their responses, arrays of token ids, side by side. Prompts and responses are not empty."""
    prompt_length_B = np.array([len(ids) for ids in prompts])
    length_B = np.array([len(ids) for ids in responses])
    columns = int((prompt_length_B + length_B).max())
    input_ids_BL = np.zeros((len(prompts), columns), dtype=np.int64)
    for row, prompt, response in zip(input_ids_BL, prompts, responses, strict=True):
        row[: len(prompt) + len(response)] = np.concatenate((prompt, response))
    # the first response token is predicted by the prompt's last column, the last by the column before it
    first_B = np.arange(len(prompts)) * columns + prompt_length_B - 1
    position_N = np.concatenate([np.arange(first, first + n) for first, n in zip(first_B, length_B, strict=True)])
    arrays = input_ids_BL, position_N, np.concatenate(responses).astype(np.int64), length_B
    return Tokens(*map(torch.from_numpy, arrays), real=int((prompt_length_B + length_B).sum()))


def partition(length_B: np.ndarray, tokens: int = 0, parts: int = 0, unit: int = 1) -> list[np.ndarray]:
    """Split trajectories into runs of similar length, as few as `tokens` allows or `parts` balanced ones.

    Args:
        length_B: prompt + response tokens of each trajectory.
        tokens: bound on (trajectories in a run) x (longest of the run).
        parts: number of runs; the bound is then the least that this number allows, and empty runs fill up.
        unit: this many neighbours stay together (the two of a pair).

    Returns:
        Indices into `length_B`, one array a run, longest trajectories first.
    """
    longest_U = length_B.reshape(-1, unit).max(axis=1)
    order_U = np.argsort(-longest_U, kind="stable")
    longest_U = longest_U[order_U]

    def starts(bound: int) -> list[int]:
        found, start = [], 0
        while start < len(longest_U):
            found.append(start)
            start += max(1, bound // int(unit * longest_U[start]))
        return found

    if parts:
        low, high = int(unit * longest_U[0]), int(len(length_B) * longest_U[0])
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(starts(middle)) <= parts else (middle + 1, high)
        tokens = low
    runs = np.split(order_U, starts(tokens)[1:])
    runs = [(run[:, None] * unit + np.arange(unit)).ravel() for run in runs]
    return runs + [np.empty(0, dtype=np.int64)] * (parts - len(runs))


def response_log_probs(model: nn.Module, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """log pi of each response token and the hidden states that predict them.

    Args:
        model: a Hugging Face causal language model.
        tokens: the padded batch.

    Returns:
        log_probs_N, float32 (float64 for a float64 model) at temperature 1 over the full vocabulary; hidden_ND.
    """
    hidden_BLD = model.get_decoder()(tokens.input_ids_BL, use_cache=False).last_hidden_state
    hidden_ND = hidden_BLD.flatten(0, 1).index_select(0, tokens.position_N)
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return token_log_probs(hidden_ND, head.weight, tokens.target_N, head.bias, softcap), hidden_ND


def token_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, bias_V: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """log softmax(hidden @ weight^T + bias) at the targets, [N], in chunks of positions recomputed in the backward.

    torch < 2.13 has no chunked operator, and a soft cap on the logits (Gemma) does not fit into it: both take the
    project's own chunks.
    """
    chunk = max(512, CHUNK_LOGITS // len(weight_VD))
    if hasattr(F, "linear_cross_entropy") and softcap is None:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=min(chunk, max(1, len(target_N))))
        return -F.linear_cross_entropy(
            hidden_ND, weight_VD, target_N, linear_bias=bias_V, reduction="none", options=options
        )

    def chunk_log_probs(hidden_CD: Tensor, target_C: Tensor) -> Tensor:
        with torch.autocast(hidden_CD.device.type, enabled=False):  # logits in bfloat16 err by .04 a token
            logits_CV = F.linear(hidden_CD.to(weight_VD.dtype), weight_VD, bias_V)
            if softcap is not None:
                logits_CV = softcap * torch.tanh(logits_CV / softcap)
            return -F.cross_entropy(logits_CV, target_C, reduction="none")

    chunks = zip(hidden_ND.split(chunk), target_N.split(chunk), strict=True)
    return torch.cat([checkpoint(chunk_log_probs, hidden, target, use_reentrant=False) for hidden, target in chunks])


@torch.no_grad()
def score(
    model: nn.Module, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], microbatch_tokens: int
) -> list[np.ndarray]:
    """log mu of every response, float32 arrays in the order given, by the very forward that trains."""
    device = next(model.parameters()).device
    length_B = np.array([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
    scores: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for run in partition(length_B, microbatch_tokens):
        tokens = pad([prompts[i] for i in run], [responses[i] for i in run])
        log_probs_N, _ = response_log_probs(model, tokens.to(device))
        # a certain token's log-prob can round to a little above 0
        log_probs_N = log_probs_N.clamp(max=0).float().cpu()
        for i, log_probs_T in zip(run, log_probs_N.split(tokens.length_B.tolist()), strict=True):
            scores[i] = log_probs_T.numpy()
    return scores
