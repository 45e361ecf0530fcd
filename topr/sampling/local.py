"""Sampling in this process: a response that ends leaves its row to the next one at once.

All rows write their newest token at one column, the cursor. A row owns the columns from its start to the cursor; it has
no gaps, so masks by column distance (sliding windows) hold. Keys already contain their positions: a prompt is computed
once, and its keys and values are copied to the columns before the cursor in every row that continues it.

Shapes: R rows, C columns of the buffers, P prompts, L columns of them, H key/value heads, D their width, V vocabulary.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from topr.distributed import Progress, stop_requested
from topr.policy import Policy
from topr.sampling.base import Ids, Response, Sampler, Sampling, end_of_response, first_end

MOST_ROWS = 512


class Draft(NamedTuple):
    """A response that is being sampled, and a random number for each of its tokens, whatever is decoded beside it."""

    ids: Ids
    draws: np.ndarray


class LocalSampler(Sampler):
    """Samples in this process. A requested stop returns the responses so far, unfinished ones included.

    Args:
        rows: responses decoded side by side; by default 512, or fewer that fit into a GPU's memory (Mamba: always 512).
    """

    def __init__(self, rows: PositiveInt | None = None):
        self.rows = rows

    @torch.no_grad()
    def sample(self, policy, prompts, n, sampling, seed, numbers=()) -> list[list[Response]]:
        responses: list[list[Ids]] = [[[] for _ in range(n)] for _ in prompts]
        numbered = zip(prompts, responses, numbers or range(len(prompts)), strict=True)
        shape = n, sampling.max_new_tokens
        jobs = (
            (prompt, list(map(Draft, empty, np.random.default_rng([seed, number]).random(shape))))
            for prompt, empty, number in sorted(
                numbered, key=lambda job: -len(job[0])
            )  # see `Rows.prefill`
        )
        model: Any = policy.model
        training, configured, ends = model.training, model.generation_config, policy.end_tokens
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        plain = all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
        )  # unlike Mamba's
        model.eval()
        try:
            if plain and not model._is_stateful and model._supports_logits_to_keep():
                Rows(policy, sampling, self.rows, n * len(prompts), self.progress).decode(jobs)
            else:
                _decode_together(self, policy, jobs, sampling)
        finally:
            model.train(training)
            model.generation_config = configured
        # in the order of their starts, which does not depend on their lengths
        return [[Response(ids, ids[-1] in ends) for ids in some if ids] for some in responses]


class Rows:
    """Responses decoded side by side, by a model whose cache contains keys and values only."""

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        rows: int | None,
        responses: int,
        progress: Progress,
    ):
        self.model, self.device, self.progress = policy.model, policy.device, progress
        self.sampling, self.ended = sampling, end_of_response(policy, sampling)
        self.given = rows is not None
        self.tokens = (
            rows or MOST_ROWS
        )  # of prompts that are computed at once; a step computes one a row
        self.drafts: list[Draft | None] = [None] * min(
            self.tokens, responses
        )  # None: the row is free
        self.starts = [0] * len(self.drafts)  # first column of each row
        self.cache: Any = None
        self.first = self.cursor = self.columns = (
            0  # first column of any row, column to write next, end of the buffers
        )

    def decode(self, jobs: Iterator[tuple[Ids, list[Draft]]]) -> None:
        """Extend the empty drafts of each prompt; no prompt may be longer than those before."""
        ready: list[tuple[int, Draft]] = []  # index of a computed prompt, response to start
        while not stop_requested.is_set():
            while None in self.drafts and (ready := ready or self.prefill(jobs)):
                free = [row for row, draft in enumerate(self.drafts) if draft is None]
                started = dict(zip(free, ready, strict=False))
                ready = ready[len(started) :]
                self.append(self.start(started), list(started))
            if not any(self.drafts):
                break
            self.append(self.step(), list(range(len(self.drafts))))

    def prefill(self, jobs: Iterator[tuple[Ids, list[Draft]]]) -> list[tuple[int, Draft]]:
        """Compute the next prompts; the drafts to `start`, each with the index of its prompt."""
        if not (first := next(jobs, None)):
            return []
        batch = [first, *islice(jobs, max(0, self.tokens // len(first[0]) - 1))]
        prompts = [prompt for prompt, _ in batch]
        ids_PL, mask_PL = _pad_left(prompts, self.device)
        self.prompts: Any = (
            DynamicCache()
        )  # without the config, whose sliding windows would drop columns
        self.lengths, self.width = [len(prompt) for prompt in prompts], ids_PL.shape[1]
        self.logits_PV = self._forward(
            ids_PL, mask_PL, (mask_PL.cumsum(-1) - 1).clamp(min=0), self.prompts
        )
        if self.cache is None:
            self.cursor, self.starts = self.width, [self.width] * len(self.drafts)
            self.cache = Cache(layers=[Layer(self, layer) for layer in self.prompts.layers])
            self._resize(list(range(self._fitting_rows())))
        return [(index, draft) for index, (_, drafts) in enumerate(batch) for draft in drafts]

    def _fitting_rows(self) -> int:
        """The rows that fit into the free memory when each is as long as it may become."""
        columns = 1.25 * (self.width + self.sampling.max_new_tokens)  # see `_resize`
        size = self.cache.layers[0].keys.element_size()
        token = size * sum(
            p.keys[0, :, 0].numel() + p.values[0, :, 0].numel() for p in self.prompts.layers
        )
        row = token * columns + 16 * self.logits_PV.shape[1]  # scores, sorted and summed
        free = (
            math.inf if self.given else free_memory(self.device)
        )  # beside the weights that autocast has copied
        return int(
            min(len(self.drafts), max(1, 0.8 * free / row))
        )  # a fifth for the layers' own tensors

    def start(self, started: dict[int, tuple[int, Draft]]) -> Tensor:
        """Start in each row the response to a prompt of the last `prefill`; logits_RV of the first tokens."""
        index_R, index_P = _copy(
            [[row, prompt] for row, (prompt, _) in started.items()], self.device
        ).T
        columns = slice(self.cursor - self.width, self.cursor)
        for layer, prompts in zip(self.cache.layers, self.prompts.layers, strict=True):
            layer.keys[index_R, :, columns] = prompts.keys[index_P].to(layer.keys.dtype)
            layer.values[index_R, :, columns] = prompts.values[index_P].to(layer.values.dtype)
        for row, (prompt, draft) in started.items():
            self.starts[row], self.drafts[row] = self.cursor - self.lengths[prompt], draft
        return self.logits_PV[index_P]

    def step(self) -> Tensor:
        """Compute the newest token of every row; logits_RV of the next ones."""
        taken = [row for row, draft in enumerate(self.drafts) if draft is not None]
        if self.cursor == self.columns or len(taken) < 0.75 * len(
            self.drafts
        ):  # not at once: it copies the buffers
            self._resize(taken)
        self.first = min(self.starts)
        newest = [draft.ids[-1] if draft else 0 for draft in self.drafts]
        token_R, start_R = _copy([newest, self.starts], self.device)
        mask_RC = torch.arange(self.first, self.cursor + 1, device=self.device) >= start_R[:, None]
        logits_RV = self._forward(
            token_R[:, None], mask_RC, (self.cursor - start_R)[:, None], self.cache
        )
        self.cursor += 1
        return logits_RV

    def append(self, logits_RV: Tensor, rows: list[int]) -> None:
        """Sample a token for each of these rows, and free the rows whose response ends."""
        drafts = [self.drafts[row] for row in rows]
        draws = [draft.draws[len(draft.ids)] if draft else 0.0 for draft in drafts]
        tokens = sample_tokens(logits_RV, draws, self.sampling).tolist()
        ended = 0
        for row, draft, token in zip(rows, drafts, tokens, strict=True):
            if draft is not None:
                draft.ids.append(token)
                if self.ended(draft.ids):
                    ended += 1
                    self.drafts[row] = None
                    self.starts[row] = (
                        self.cursor
                    )  # the positions of a free row must not exceed the model's
        self.progress.advance(ended, len(drafts) - drafts.count(None))

    def _forward(
        self, ids_RL: Tensor, mask_RC: Tensor, position_RL: Tensor, cache: Cache
    ) -> Tensor:
        inputs = {
            "input_ids": ids_RL,
            "attention_mask": mask_RC.long(),
            "position_ids": position_RL,
        }
        return self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]

    def _resize(self, rows: list[int]) -> None:
        """Keep only these rows, and the columns that they or the next prompts use; make room for more columns."""
        first = min([self.starts[row] for row in rows] + [self.cursor - self.width])
        used = self.cursor - first
        self.columns = used + max(32, used // 4)
        index_R = _copy(rows, self.device)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                kept_RHCD = getattr(layer, name)[index_R, :, first : self.cursor]
                # zeros, because a masked value is multiplied by 0, which does not remove NaN
                setattr(layer, name, F.pad(kept_RHCD, (0, 0, 0, self.columns - kept_RHCD.shape[2])))
        self.drafts = [self.drafts[row] for row in rows]
        self.starts, self.cursor = [self.starts[row] - first for row in rows], used


class Layer(DynamicLayer):
    """Keys and values of one decoder layer for all rows; as yet without columns."""

    def __init__(self, rows: Rows, prompts: Any):
        super().__init__()
        self.rows, self.is_initialized = rows, True
        repeat = [0] * len(rows.starts)
        # attention computes in this type; rotary embeddings return float32, and transformers stores all as the keys are
        kind, dtype = rows.device.type, prompts.values.dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        self.keys: Any = prompts.keys[repeat, :, :0].to(dtype)
        self.values: Any = prompts.values[repeat, :, :0].to(dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        first, cursor = self.rows.first, self.rows.cursor
        self.keys[:, :, cursor : cursor + 1] = key_states
        self.values[:, :, cursor : cursor + 1] = value_states
        return self.keys[:, :, first : cursor + 1], self.values[:, :, first : cursor + 1]

    def get_seq_length(self) -> int:
        return self.rows.cursor - self.rows.first


def sample_tokens(logits_RV: Tensor, draws: Sequence[float], sampling: Sampling) -> Tensor:
    """A token of each row, [R], by its uniform random number: temperature, top-k, top-p, in transformers' order."""
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV, token_RV = logits_RV.float() / sampling.temperature, None
    vocabulary = scores_RV.shape[1]
    if 0 < sampling.top_k < vocabulary or sampling.top_p < 1:
        scores_RV, token_RV = scores_RV.topk(
            min(sampling.top_k or vocabulary, vocabulary)
        )  # likeliest first
    share_RV = scores_RV.softmax(-1)
    if sampling.top_p < 1:
        share_RV = share_RV.masked_fill(share_RV.cumsum(-1) - share_RV >= sampling.top_p, 0.0)
    sum_RV = share_RV.cumsum(-1, dtype=torch.float64)
    draw_R1 = _copy(draws, sum_RV.device)[:, None]
    choice_R1 = torch.searchsorted(sum_RV, draw_R1 * sum_RV[:, -1:], right=True)
    return (choice_R1 if token_RV is None else token_RV.gather(1, choice_R1))[:, 0]


def free_memory(device: torch.device) -> float:
    """Bytes of a GPU that this process can still take; no bound on a CPU."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _copy(numbers: Sequence, device: torch.device) -> Tensor:
    """Numbers, float64 or int64, on a device; a GPU goes on computing meanwhile."""
    return torch.from_numpy(np.array(numbers)).to(device, non_blocking=True)


def _pad_left(prompts: list[Ids], device: torch.device) -> tuple[Tensor, ...]:
    rows = [torch.tensor([ids, [1] * len(ids)]).T for ids in prompts]
    return (
        pad_sequence(rows, batch_first=True, padding_side="left")
        .to(device, non_blocking=True)
        .unbind(-1)
    )


def _decode_together(
    sampler: LocalSampler, policy: Policy, jobs: Iterable, sampling: Sampling
) -> None:
    """Extend the empty drafts by transformers' `generate`, which waits for the longest of each batch."""
    model: Any = policy.model
    ended, pairs = (
        end_of_response(policy, sampling),
        ((prompt, draft) for prompt, drafts in jobs for draft in drafts),
    )
    warnings.warn(
        f"{type(model).__name__} caches more than keys and values: its rows are not refilled",
        stacklevel=2,
    )

    def draw(ids_RL: Tensor, logits_RV: Tensor) -> Tensor:
        token_R = sample_tokens(
            logits_RV, [draft.draws[ids_RL.shape[1] - width] for _, draft in batch], sampling
        )
        return torch.full_like(logits_RV, -torch.inf).scatter(1, token_R[:, None], 0.0)

    def stop(ids_RL: Tensor, _) -> Tensor:
        done = [stop_requested.is_set() or ended(ids) for ids in ids_RL[:, width:].tolist()]
        return torch.tensor(done, device=ids_RL.device)

    # instead of the model's own, which `sample` restores
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=sampling.max_new_tokens
    )
    # synced_gpus: every rank has all weights, so ranks with fewer prompts must not wait for the others
    options: Any = {"logits_processor": [draw], "stopping_criteria": [stop], "synced_gpus": False}
    while not stop_requested.is_set() and (batch := list(islice(pairs, sampler.rows or MOST_ROWS))):
        ids_PL, mask_PL = _pad_left([prompt for prompt, _ in batch], policy.device)
        width = ids_PL.shape[1]
        output_RL = model.generate(ids_PL, attention_mask=mask_PL, **options)
        for (_, draft), ids in zip(batch, output_RL[:, width:].tolist(), strict=True):
            draft.ids.extend(ids[: first_end(ids, ended)])
            sampler.progress.advance(1, len(draft.ids))
