"""Sampling in this process: when a response ends, its row starts the next one at once.

The cache holds keys and values of R rows in C columns. All rows write their newest token into one
column, the cursor. A row owns the columns from its start to the cursor, without gaps:

    column   0  1  2  3  4  5  6  7 | 8 = cursor
    row 0    .  p  p  p  r  r  r  r |              p: prompt, r: response; starts at column 1
    row 1    .  .  .  .  .  p  p  r |              began later; starts at column 5
    row 2    .  .  .  .  .  .  .  . |              free

Keys contain their positions: a token's distance from the start of its row. So a prompt is computed
once, and its keys and values are copied to the columns before the cursor in every row that
continues it. As rows have no gaps, columns are as far apart as their tokens, which is what the mask
of a sliding window needs.

Shapes: R rows, C columns, P prompts, L columns of the prompts, H key/value heads, D their width,
V vocabulary.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from topr.distributed import stop_requested
from topr.policy import Policy
from topr.sampling.base import Ids, Response, Sampler, Sampling, end_of_response

MOST_ROWS = 512


class LocalSampler(Sampler):
    """Samples in this process. A requested stop returns the responses so far, also unfinished ones.

    Args:
        rows: at most this many responses are decoded side by side, by default 512; fewer if no
            more fit into a GPU's memory (models like Mamba are not limited).
    """

    def __init__(self, rows: PositiveInt | None = None):
        self.rows = rows

    @torch.no_grad()
    def sample(
        self,
        policy: Policy,
        prompts: list[Ids],
        n: int,
        sampling: Sampling,
        seed: int,
        prompt_indices: Sequence[int] = (),
    ) -> list[list[Response]]:
        groups = []  # the n drafts of each prompt
        for prompt, index in zip(prompts, prompt_indices or range(len(prompts)), strict=True):
            draws = np.random.default_rng([seed, index]).random((n, sampling.max_new_tokens))
            groups.append([Draft(prompt, iter(draws_of_one)) for draws_of_one in draws])
        queue = [draft for group in groups for draft in group]
        queue.sort(key=lambda draft: len(draft.prompt), reverse=True)

        model = policy.model
        end_tokens = policy.end_tokens
        training = model.training
        own_settings = model.generation_config
        model.eval()
        try:
            rows = Rows(policy, sampling, queue, n, self.rows or MOST_ROWS)
            if caches_keys_and_values_only(model):
                rows.decode()
            else:
                rows.decode_together()
        finally:
            model.train(training)
            model.generation_config = own_settings

        responses = []
        for group in groups:
            begun = [draft.ids for draft in group if draft.ids]
            responses.append([Response(ids, ids[-1] in end_tokens) for ids in begun])
        return responses


@dataclass(eq=False)
class Draft:
    """A response that is being sampled."""

    prompt: Ids
    draws: Iterator[float]  # a uniform random number for each token
    ids: Ids = field(default_factory=list)
    ended: bool = False  # its row is free
    prompt_row: int = 0  # of its prompt among those computed together
    start: int = 0  # first column of its row


def caches_keys_and_values_only(model: PreTrainedModel) -> bool:
    """Whether rows can be refilled; the cache of Mamba, for example, holds another state."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return plain and not model._is_stateful and model._supports_logits_to_keep()


class Rows:
    """Responses decoded side by side; see the top of this file.

    Args:
        policy: the model to sample from.
        sampling: sampling parameters.
        queue: the drafts to extend, those of one prompt together, the longest prompts first. The
            columns before the cursor then have room for every later prompt.
        n: drafts of each prompt.
        most: responses side by side.
    """

    def __init__(self, policy: Policy, sampling: Sampling, queue: list[Draft], n: int, most: int):
        self.model = policy.model
        self.device = policy.device
        self.sampling = sampling
        self.is_end = end_of_response(policy, sampling)
        self.queue = queue
        self.n = n
        self.most = most
        free = Draft(prompt=[], draws=iter([]), ids=[0], ended=True)
        self.drafts = [free]  # of each row; a row is free when its draft has ended
        self.buffers: list[Tensor] = []  # keys and values of each layer, [R, H, C, D]
        self.cursor = 0  # the column to write next
        self.first = 0  # the first column in use

    def decode(self) -> None:
        """Extend every draft to its end, or until a stop is requested."""
        waiting: list[Draft] = []  # their prompts are computed
        while not stop_requested.is_set():
            free = [row for row, draft in enumerate(self.drafts) if draft.ended]
            if free and waiting:
                self.start(waiting[: len(free)], free[: len(waiting)])
                waiting = waiting[len(free) :]
            elif free and self.queue:
                waiting = self.prefill()
            elif len(free) < len(self.drafts):
                self.step()
            else:
                return

    def prefill(self) -> list[Draft]:
        """Compute the next prompts; the drafts that continue them."""
        count = max(1, self.most // len(self.queue[0].prompt)) * self.n
        drafts = self.queue[:count]
        for i, draft in enumerate(drafts):
            draft.prompt_row = i // self.n
        ids_PL, mask_PL = pad_left(drafts[:: self.n], self.device)
        position_PL = (mask_PL.cumsum(-1) - 1).clamp(min=0)
        # Made without the model's config, whose sliding windows would drop columns.
        cache = DynamicCache()
        self.prompt_logits_PV = self.forward(ids_PL, mask_PL, position_PL, cache)
        self.prompt_width = ids_PL.shape[1]
        self.prompt_states = []
        for layer in cache.layers:
            self.prompt_states += [layer.keys, layer.values]
        if torch.is_autocast_enabled(self.device.type):
            # Attention computes in this type, but rotary embeddings return float32.
            dtype = torch.get_autocast_dtype(self.device.type)
            self.prompt_states = [states.to(dtype) for states in self.prompt_states]
        if not self.buffers:
            self.allocate()
        self.queue = self.queue[count:]
        return drafts

    def allocate(self) -> None:
        """Make buffers for as many rows as are wanted and fit into a GPU's memory."""
        rows = min(self.most, len(self.queue))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            longest = self.prompt_width + self.sampling.max_new_tokens
            vocabulary = self.prompt_logits_PV.shape[1]
            rows = min(rows, rows_that_fit(free, self.prompt_states, longest, vocabulary))
        self.cursor = self.prompt_width
        layers = [RowLayer(self, index) for index in range(0, len(self.prompt_states), 2)]
        self.cache = Cache(layers=layers)
        # At first every row is free, and holds a copy of the first prompt.
        self.buffers = list(self.prompt_states)
        self.resize([0] * rows)

    def start(self, drafts: list[Draft], rows: list[int]) -> None:
        """Copy the prompts of drafts into free rows, and sample their first tokens."""
        row_R = to_device(rows, self.device)
        prompt_R = to_device([draft.prompt_row for draft in drafts], self.device)
        columns = slice(self.cursor - self.prompt_width, self.cursor)
        for buffer, states in zip(self.buffers, self.prompt_states, strict=True):
            buffer[row_R, :, columns] = states[prompt_R]
        for row, draft in zip(rows, drafts, strict=True):
            self.drafts[row] = draft
            draft.start = self.cursor - len(draft.prompt)
        self.append(drafts, self.prompt_logits_PV[prompt_R])

    def step(self) -> None:
        """Compute the newest token of every row, and sample the next one."""
        taken = [row for row, draft in enumerate(self.drafts) if not draft.ended]
        # Free rows are not dropped at once, because that copies the buffers.
        if self.cursor == self.buffers[0].shape[2] or len(taken) < 0.75 * len(self.drafts):
            self.resize(taken)
        starts = [draft.start for draft in self.drafts]
        self.first = min(starts)
        token_R1 = to_device([draft.ids[-1] for draft in self.drafts], self.device)[:, None]
        start_R1 = to_device(starts, self.device)[:, None]
        column_C = torch.arange(self.first, self.cursor + 1, device=self.device)
        mask_RC = (column_C >= start_R1).long()
        logits_RV = self.forward(token_R1, mask_RC, self.cursor - start_R1, self.cache)
        self.cursor += 1
        self.append(self.drafts, logits_RV)

    def append(self, drafts: list[Draft], logits_RV: Tensor) -> Tensor:
        """Sample the next token of each draft; [R]. A draft that ends frees its row."""
        draws = [next(draft.draws, 0.0) for draft in drafts]
        token_R = sample_tokens(logits_RV, draws, self.sampling)
        for draft, token in zip(drafts, token_R.tolist(), strict=True):
            if not draft.ended:
                draft.ids.append(token)
                draft.ended = self.is_end(draft.ids)
                if draft.ended:
                    draft.start = self.cursor  # a free row's positions stay within the model's
        return token_R

    def forward(self, ids_RL: Tensor, mask_RC: Tensor, position_RL: Tensor, cache: Cache) -> Tensor:
        """The logits after the last of these tokens, [R, V]; the cache then holds the tokens."""
        output = self.model(
            input_ids=ids_RL,
            attention_mask=mask_RC,
            position_ids=position_RL,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def write(self, buffer: int, newest_RH1D: Tensor) -> Tensor:
        """Write the newest column into a buffer; the columns in use."""
        end = self.cursor + 1
        self.buffers[buffer][:, :, self.cursor : end] = newest_RH1D
        return self.buffers[buffer][:, :, self.first : end]

    def resize(self, rows: list[int]) -> None:
        """Keep these rows, and the columns that they or the next prompts need; add free columns."""
        self.drafts = [self.drafts[row] for row in rows]
        starts = [draft.start for draft in self.drafts]
        first = min(*starts, self.cursor - self.prompt_width)
        for draft in self.drafts:
            draft.start -= first
        row_R = to_device(rows, self.device)
        used = self.cursor - first
        # Zeros, because a masked value is multiplied by 0, which does not remove NaN.
        padding = (0, 0, 0, max(32, used // 4))
        for i, states_RHCD in enumerate(self.buffers):
            self.buffers[i] = F.pad(states_RHCD[row_R, :, first : self.cursor], padding)
        self.cursor = used

    def decode_together(self) -> None:
        """Like `decode`, by transformers' `generate`: each batch waits for its longest response."""
        name = type(self.model).__name__
        warnings.warn(f"{name} caches more than keys and values: no row is refilled", stacklevel=3)

        def choose(ids_RL: Tensor, logits_RV: Tensor) -> Tensor:
            """Make the sampled token the only possible one."""
            token_R1 = self.append(self.drafts, logits_RV)[:, None]
            return torch.full_like(logits_RV, -torch.inf).scatter(1, token_R1, 0.0)

        def stop(ids_RL: Tensor, _: Tensor) -> Tensor:
            over = stop_requested.is_set() or all(draft.ended for draft in self.drafts)
            return torch.full(ids_RL.shape[:1], over, device=self.device)

        # The model's own settings, such as suppressed tokens, would change the distribution.
        self.model.generation_config = GenerationConfig(max_new_tokens=self.sampling.max_new_tokens)
        options: Any = {"logits_processor": [choose], "stopping_criteria": [stop]}
        while self.queue and not stop_requested.is_set():
            self.drafts = self.queue[: self.most]
            self.queue = self.queue[self.most :]
            ids_PL, mask_PL = pad_left(self.drafts, self.device)
            # synced_gpus: each rank has all weights, and need not wait for the others.
            self.model.generate(ids_PL, attention_mask=mask_PL, synced_gpus=False, **options)


class RowLayer(DynamicLayer):
    """One decoder layer's part of the buffers, as transformers' attention sees it."""

    def __init__(self, rows: Rows, index: int):
        super().__init__()
        self.is_initialized = True
        self.rows = rows
        self.index = index  # of its keys; its values follow them

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = self.rows.write(self.index, key_states)
        return keys, self.rows.write(self.index + 1, value_states)

    def get_seq_length(self) -> int:
        return self.rows.cursor - self.rows.first


def rows_that_fit(free: int, states: list[Tensor], longest: int, vocabulary: int) -> int:
    """How many rows of `longest` tokens fit into `free` bytes, with keys and values like these."""
    column = sum(states_PHLD[0, :, 0].nbytes for states_PHLD in states)
    buffers = 1.25 * longest * column  # see `Rows.resize`
    scores = 16 * vocabulary  # in float32, sorted, and summed in float64
    # A fifth is left for the layers' own tensors.
    return max(1, int(0.8 * free / (buffers + scores)))


def sample_tokens(logits_RV: Tensor, draws: Sequence[float], sampling: Sampling) -> Tensor:
    """A token of each row, [R], by its uniform random number: the first token at which the sum of
    the probabilities exceeds that number. Temperature, top-k, top-p, in transformers' order."""
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV = logits_RV.float() / sampling.temperature
    vocabulary = scores_RV.shape[1]
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    token_RV = None  # of each score, if they are sorted
    if top_k < vocabulary or sampling.top_p < 1:
        scores_RV, token_RV = scores_RV.topk(top_k)
    share_RV = scores_RV.softmax(-1)
    if sampling.top_p < 1:
        likelier_RV = share_RV.cumsum(-1) - share_RV
        share_RV = share_RV.masked_fill(likelier_RV >= sampling.top_p, 0.0)

    sum_RV = share_RV.cumsum(-1, dtype=torch.float64)
    draw_R1 = to_device(draws, sum_RV.device)[:, None]
    choice_R1 = torch.searchsorted(sum_RV, draw_R1 * sum_RV[:, -1:], right=True)
    if token_RV is not None:
        choice_R1 = token_RV.gather(1, choice_R1)
    return choice_R1[:, 0]


def to_device(numbers: Sequence, device: torch.device) -> Tensor:
    """Numbers, float64 or int64, on a device; a GPU keeps computing meanwhile."""
    return torch.from_numpy(np.array(numbers)).to(device, non_blocking=True)


def pad_left(drafts: list[Draft], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of the drafts' prompts, [P, L] both."""
    rows = [torch.tensor(draft.prompt) for draft in drafts]
    ids_PL = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    ids_PL = ids_PL.to(device, non_blocking=True)
    return ids_PL.clamp(min=0), (ids_PL >= 0).long()
