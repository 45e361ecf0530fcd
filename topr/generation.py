"""Decoding side by side without waiting: a response that ends leaves its row to the next one at once.

All rows write their newest token at one common column, the cursor, and a row owns the columns from its start up to
there. Keys hold their positions already, so a prompt is computed once, and its keys and values are copied to the
columns just before the cursor of every row that continues it. A row's columns follow each other: masks by distance
between columns (sliding windows) stay right.

Shapes: R rows, C columns of the buffers, P prompts, L columns of them, H key/value heads, D their width, V vocabulary.
"""

import warnings
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from topr.attention import autocast_dtype

Ids = list[int]


def generate(
    model: nn.Module,
    prompts: list[Ids],
    n: int,
    rows: int,
    draw: Callable[[Tensor], Tensor],
    ended: Callable[[Ids], bool],
    interrupted: Callable[[], bool],
    longest: int,
) -> list[list[Ids]]:
    """n responses to each prompt, each wherever it was begun, so that its place says nothing about its length.

    Args:
        model: a Hugging Face causal language model, in evaluation mode.
        prompts: their token ids.
        n: responses per prompt.
        rows: responses side by side.
        draw: tokens, [R], from logits, [R, V].
        ended: whether a response ends with its last token.
        interrupted: asked at each token; once true, what is there returns, unfinished responses included.
        longest: tokens of a response after which `ended` is true in any case.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))  # longest first: see `Rows.prefill`
    if not _has_plain_cache(model):
        warnings.warn(
            f"{type(model).__name__} keeps more than keys and values: its responses wait for the longest of each batch",
            stacklevel=3,
        )
        return _generate_together(model, prompts, n, rows, draw, ended, interrupted, longest, waiting)
    responses: list[list[Ids]] = [[[] for _ in range(n)] for _ in prompts]
    batch = Rows(model, min(rows, n * len(prompts)))
    ready: deque[tuple[int, Ids]] = deque()  # number of a computed prompt, the response to begin
    while not interrupted():
        free = batch.free()
        while free and (ready or waiting):
            if not ready:  # as many tokens as a step has, which keeps the device as busy
                group = [waiting.popleft() for _ in range(min(len(waiting), max(1, rows // len(prompts[waiting[0]]))))]
                logits_PV = batch.prefill([prompts[i] for i in group])
                ready.extend((number, ids) for number, i in enumerate(group) for ids in responses[i])
            begun = [ready.popleft() for _ in range(min(len(ready), len(free)))]
            numbers, taken = [number for number, _ in begun], free[: len(begun)]
            batch.fill(taken, numbers, [ids for _, ids in begun])
            batch.append(draw(logits_PV[numbers]), taken, ended)
            free = batch.free()
        if len(free) == len(batch.responses):
            break
        batch.append(draw(batch.step()), range(len(batch.responses)), ended)
    return [[ids for ids in row if ids] for row in responses]


class Rows:
    """Responses that are decoded side by side; who occupies a row changes.

    Args:
        model: see `generate`; its cache holds keys and values alone.
        count: rows.
    """

    def __init__(self, model: nn.Module, count: int):
        self.model, self.device = model, next(model.parameters()).device
        self.responses: list[Ids | None] = [None] * count
        self.start = [0] * count  # first column of each row
        self.token_R = torch.zeros(count, dtype=torch.long, device=self.device)  # the newest, not yet in the buffers
        self.cache: Cache | None = None
        self.first = self.cursor = self.columns = 0  # first column of any row, next one to write, end of the buffers

    def free(self) -> list[int]:
        return [row for row, ids in enumerate(self.responses) if ids is None]

    def prefill(self, prompts: list[Ids]) -> Tensor:
        """Compute prompts, none longer than those before, for `fill`; logits_PV of the tokens that follow them."""
        ids_PL, position_PL = _pad_left(prompts, self.device)
        self.prompts = DynamicCache()  # without the windows of the config, which would drop columns
        self.lengths, self.width = [len(prompt) for prompt in prompts], ids_PL.shape[1]
        logits_PV = self._forward(ids_PL, position_PL >= 0, position_PL.clamp(min=0), self.prompts)
        if self.cache is None:
            self.cache = Cache(layers=[Layer(self, layer, len(self.start)) for layer in self.prompts.layers])
            self.cursor, self.start = self.width, [self.width] * len(self.start)
            self._move(range(len(self.start)))
        return logits_PV

    def fill(self, rows: list[int], numbers: list[int], responses: list[Ids]) -> None:
        """Begin responses in these rows, each to a prompt of the last `prefill`, given by its number."""
        index_R, index_P = (torch.tensor(index, device=self.device) for index in (rows, numbers))
        columns = slice(self.cursor - self.width, self.cursor)
        for layer, prompt in zip(self.cache.layers, self.prompts.layers, strict=True):
            layer.keys[index_R, :, columns] = prompt.keys[index_P].to(layer.keys.dtype)
            layer.values[index_R, :, columns] = prompt.values[index_P].to(layer.values.dtype)
        for row, number, ids in zip(rows, numbers, responses, strict=True):
            self.start[row], self.responses[row] = self.cursor - self.lengths[number], ids

    def append(self, token_R: Tensor, rows: Sequence[int], ended: Callable[[Ids], bool]) -> None:
        """Take the newest token of each of these rows; those whose response has ended are free."""
        self.token_R[torch.tensor(rows, device=self.device)] = token_R
        for row, token in zip(rows, token_R.tolist(), strict=True):
            if (ids := self.responses[row]) is not None:
                ids.append(token)
                if ended(ids):
                    self.responses[row] = None
                    self.start[row] = self.cursor  # its positions must not run on past the model's last

    def step(self) -> Tensor:
        """Compute the newest token of every row; logits_RV of the next ones."""
        taken = [row for row, ids in enumerate(self.responses) if ids is not None]
        if self.cursor == self.columns or len(taken) < 0.75 * len(self.start):  # in steps, since it copies the buffers
            self._move(taken)
        self.first = min(self.start)
        start_R = torch.tensor(self.start, device=self.device)
        column_C = torch.arange(self.first, self.cursor + 1, device=self.device)
        mask_RC = column_C >= start_R[:, None]
        logits_RV = self._forward(self.token_R[:, None], mask_RC, (self.cursor - start_R)[:, None], self.cache)
        self.cursor += 1
        return logits_RV

    def _forward(self, ids_RL: Tensor, mask_RC: Tensor, position_RL: Tensor, cache: Cache) -> Tensor:
        how = {"attention_mask": mask_RC.long(), "position_ids": position_RL, "past_key_values": cache}
        return self.model(input_ids=ids_RL, **how, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _move(self, rows: Sequence[int]) -> None:
        """Keep these rows alone, from the first column that they or the next prompts use, with room behind them."""
        first = min([self.start[row] for row in rows] + [self.cursor - self.width])
        self.columns = (self.cursor - first) + max(32, (self.cursor - first) // 4)
        index_R = torch.tensor(rows, device=self.device)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                old_RHCD = getattr(layer, name)[:, :, first : self.cursor]
                heads, used, width = old_RHCD.shape[1:]
                # zeros, since what a mask hides is still multiplied by 0, which leaves NaN as it is
                new_RHCD = old_RHCD.new_zeros(len(rows), heads, self.columns, width)
                new_RHCD[:, :, :used] = old_RHCD[index_R]
                setattr(layer, name, new_RHCD)
        self.responses = [self.responses[row] for row in rows]
        self.start = [self.start[row] - first for row in rows]
        self.token_R = self.token_R[index_R]
        self.cursor -= first


class Layer(DynamicLayer):
    """Buffers of one decoder layer for as many rows, empty, with the heads of `like`."""

    def __init__(self, rows: Rows, like: DynamicLayer, count: int):
        super().__init__()
        self.rows, self.is_initialized = rows, True
        # what attention computes in; a prompt's keys come out of rotary embeddings in float32
        dtype = autocast_dtype(like.keys)
        self.keys = like.keys.new_empty(count, like.keys.shape[1], 0, like.keys.shape[3], dtype=dtype)
        self.values = like.values.new_empty(count, like.values.shape[1], 0, like.values.shape[3], dtype=dtype)

    def update(self, keys_RH1D: Tensor, values_RH1D: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        first, cursor = self.rows.first, self.rows.cursor
        self.keys[:, :, cursor : cursor + 1] = keys_RH1D
        self.values[:, :, cursor : cursor + 1] = values_RH1D
        return self.keys[:, :, first : cursor + 1], self.values[:, :, first : cursor + 1]

    def get_seq_length(self) -> int:
        return self.rows.cursor - self.rows.first


def sample_tokens(logits_RV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """A token of each row, [R]: temperature, then top-k, then top-p, as transformers has them; see `Sampling`."""
    if temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV, token_RV = logits_RV.float() / temperature, None
    vocabulary = scores_RV.shape[1]
    if 0 < top_k < vocabulary or top_p < 1:
        scores_RV, token_RV = scores_RV.topk(min(top_k or vocabulary, vocabulary))  # likeliest first
    share_RV = scores_RV.softmax(-1)
    if top_p < 1:
        share_RV = share_RV.masked_fill(share_RV.cumsum(-1) - share_RV >= top_p, 0.0)
    if share_RV.is_cuda:  # where sums along a row have no deterministic form
        choice_R1 = torch.multinomial(share_RV, 1)
    else:  # one random number a row instead of one a token: 7 times as fast
        sum_RV = share_RV.cumsum(-1, dtype=torch.float64)
        random_R1 = torch.rand(len(sum_RV), 1, dtype=torch.float64, device=sum_RV.device)
        choice_R1 = torch.searchsorted(sum_RV, random_R1 * sum_RV[:, -1:], right=True)
    return (choice_R1 if token_RV is None else token_RV.gather(1, choice_R1))[:, 0]


def _pad_left(prompts: list[Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids_PL and the position of each token in its prompt, below 0 for pads."""
    width = max(map(len, prompts))
    ids_PL = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    length_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids_PL, torch.arange(width, device=device) - (width - length_P)[:, None]


def _has_plain_cache(model: nn.Module) -> bool:
    """Whether the model remembers keys and values alone, no state that sums up the past (Mamba, linear attention)."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return plain and not model._is_stateful and model._supports_logits_to_keep()


def _generate_together(model, prompts, n, rows, draw, ended, interrupted, longest, order) -> list[list[Ids]]:
    """The same with transformers' `generate`."""
    responses: list[list[Ids]] = [[] for _ in prompts]
    order = [i for i in order for _ in range(n)]
    for start in range(0, len(order), rows):
        if interrupted():
            break
        ids_PL, position_PL = _pad_left(
            [prompts[i] for i in order[start : start + rows]], next(model.parameters()).device
        )

        def choose(_, logits_RV: Tensor) -> Tensor:
            return torch.full_like(logits_RV, -torch.inf).scatter(1, draw(logits_RV)[:, None], 0.0)

        def stop(ids_RL: Tensor, _, width: int = ids_PL.shape[1]) -> Tensor:
            done = [interrupted() or ended(ids) for ids in ids_RL[:, width:].tolist()]
            return torch.tensor(done, device=ids_RL.device)

        output_RL = model.generate(
            ids_PL,
            attention_mask=(position_PL >= 0).long(),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=longest),
            logits_processor=[choose],
            stopping_criteria=[stop],
            # weights are whole (see `gathered`): ranks that waited for each other at every token would never end where
            # one of them has fewer prompts
            synced_gpus=False,
        )
        for i, ids in zip(order[start : start + rows], output_RL[:, ids_PL.shape[1] :].tolist(), strict=True):
            responses[i].append(ids[: next((k for k in range(1, len(ids)) if ended(ids[:k])), len(ids))])
    return responses
