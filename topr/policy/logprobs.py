"""Log-probabilities of response tokens in their simplest form: padded rows, logits in recomputed chunks.

Shapes: B trajectories, L tokens of their row, N response tokens laid end to end, C of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from topr.batching import Tokens, pack, partition

# logits held at once: 256 positions of a 128k vocabulary on a CPU, 2,048 on a GPU, where products want more rows
CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**28}


class Head(NamedTuple):
    """The output projection of a model."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None  # of the logits (Gemma)

    @property
    def chunk(self) -> int:
        """Positions whose logits are held at once."""
        return max(64, CHUNK_LOGITS[self.weight_VD.device.type] // len(self.weight_VD))

    def logits(
        self, hidden_CD: Tensor, out_CV: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and the derivative of their soft cap, in the weight's precision: bfloat16 errs by .04 a token."""
        with torch.autocast(hidden_CD.device.type, enabled=False):
            logits_CV = torch.mm(hidden_CD.to(self.weight_VD.dtype), self.weight_VD.T, out=out_CV)
            if self.bias_V is not None:
                logits_CV += self.bias_V
            if self.softcap is None:
                return logits_CV, None
            capped_CV = torch.tanh(logits_CV / self.softcap)
            return self.softcap * capped_CV, 1 - capped_CV.square()


def output_head(model: Any) -> Head:
    """The output projection of a Hugging Face causal language model."""
    head = model.get_output_embeddings()
    return Head(
        head.weight,
        head.bias,
        getattr(model.config.get_text_config(), "final_logit_softcapping", None),
    )


def padded_hidden_states(model: Any, tokens: Tokens) -> Tensor:
    """Hidden states that predict the response tokens, [N, D], from one row a trajectory, padded on the right."""
    rows = [np.r_[first:last, start:end] for start, end, first, last in tokens.trajectories]
    columns = max(map(len, rows))
    position_N = np.concatenate(
        [i * columns + predicting for i, predicting in enumerate(tokens.predicting)]
    )
    place_BL = pad_sequence([from_numpy(row) for row in rows], batch_first=True)
    input_ids_BL = tokens.input_ids_L[place_BL.to(tokens.input_ids_L.device, non_blocking=True)]
    hidden_BLD = model.get_decoder()(input_ids_BL, use_cache=False).last_hidden_state
    return hidden_BLD.flatten(0, 1).index_select(
        0, from_numpy(position_N).to(hidden_BLD.device, non_blocking=True)
    )


def token_log_probs(hidden_ND: Tensor, head: Head, target_N: Tensor) -> Tensor:
    """log softmax(logits) at the targets, [N], in chunks of positions that the backward recomputes."""

    def chunk_log_probs(hidden_CD: Tensor, target_C: Tensor) -> Tensor:
        return -F.cross_entropy(head.logits(hidden_CD)[0], target_C, reduction="none")

    chunks = zip(hidden_ND.split(head.chunk), target_N.split(head.chunk), strict=True)
    return torch.cat(
        [
            checkpoint(chunk_log_probs, hidden, target, use_reentrant=False)
            for hidden, target in chunks
        ]
    )


@torch.no_grad()
def score(
    policy: Any,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    microbatch_tokens: int,
    sampled: Sequence[np.ndarray | None] = (),
) -> list[np.ndarray]:
    """log mu of the sampled tokens by the forward that trains: a float32 array for each response; see `pack`."""
    index: dict[bytes, int] = {}
    prompt = [index.setdefault(ids.tobytes(), len(index)) for ids in prompts]
    sizes = np.array([prompt, [len(ids) for ids in prompts], [len(ids) for ids in responses]])
    scores: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for row in partition(sizes, microbatch_tokens, padded=policy.padded):
        tokens = pack(
            *([arrays[i] for i in row] for arrays in (prompts, responses, sampled) if len(arrays))
        )
        log_probs_N, _ = policy(tokens.to(policy.device))
        log_probs_N = (
            log_probs_N.clamp(max=0).float().cpu()
        )  # that of a certain token can round to above 0
        for i, log_probs_T in zip(row, log_probs_N.split(tokens.lengths), strict=True):
            scores[i] = log_probs_T.numpy()
    return scores
