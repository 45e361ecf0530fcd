"""Sampling in this process: a response that ends leaves its row to the next one at once.

All rows write their newest token at one column, the cursor. A row owns the columns from its start to the cursor; it has
no gaps, so masks by column distance (sliding windows) hold. Keys already contain their positions: a prompt is computed
once, and its keys and values are copied to the columns before the cursor in every row that continues it.

Shapes: R rows, C columns of the buffers, P prompts, L columns of them, H key/value heads, D their width, V vocabulary.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from topr.distributed import stop_requested
from topr.policy import Policy
from topr.sampling.base import Ids, Response, Sampler, Sampling, end_of_response, first_end


class LocalSampler(Sampler):
    """Samples in this process. A requested stop returns the responses so far, unfinished ones included.

    Args:
        rows: responses decoded side by side; lower it when memory runs out. Other rows give other random numbers.
    """

    def __init__(self, rows: PositiveInt = 512):
        self.rows = rows

    @torch.no_grad()
    def sample(self, policy: Policy, prompts: list[Ids], n: int, sampling: Sampling, seed: int) -> list[list[Response]]:
        responses: list[list[Ids]] = [[[] for _ in range(n)] for _ in prompts]
        jobs = sorted(zip(prompts, responses, strict=True), key=lambda job: -len(job[0]))  # see `Rows.prefill`
        model: Any = policy.model
        training, configured, ends = model.training, model.generation_config, policy.end_tokens
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)  # unlike Mamba's
        model.eval()
        try:
            with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
                torch.manual_seed(seed)
                if plain and not model._is_stateful and model._supports_logits_to_keep():
                    Rows(policy, min(self.rows, n * len(prompts)), sampling).decode(jobs, self.rows)
                else:
                    _decode_together(policy, jobs, self.rows, sampling)
        finally:
            model.train(training)
            model.generation_config = configured
        # in the order of their starts, which does not depend on their lengths
        return [[Response(ids, ids[-1] in ends) for ids in some if ids] for some in responses]


class Rows:
    """Responses decoded side by side, by a model whose cache contains keys and values only."""

    def __init__(self, policy: Policy, count: int, sampling: Sampling):
        self.model, self.device = policy.model, policy.device
        self.sampling, self.ended = sampling, end_of_response(policy, sampling)
        self.responses: list[Ids | None] = [None] * count  # None: the row is free
        self.starts = [0] * count  # first column of each row
        self.cache: Any = None
        self.first = self.cursor = self.columns = 0  # first column of any row, column to write next, end of the buffers

    def decode(self, jobs: list[tuple[Ids, list[Ids]]], tokens: int) -> None:
        """Extend the empty responses of each (prompt, responses); computes about `tokens` prompt tokens at once."""
        ready: list[tuple[int, Ids]] = []  # index of a computed prompt, response to start
        while not stop_requested.is_set():
            while (free := [row for row, ids in enumerate(self.responses) if ids is None]) and (ready or jobs):
                if not ready:
                    size = max(1, tokens // len(jobs[0][0]))  # a step computes one token for each row
                    self.prefill([prompt for prompt, _ in jobs[:size]])
                    ready = [(index, ids) for index, (_, empty) in enumerate(jobs[:size]) for ids in empty]
                    jobs = jobs[size:]
                started = dict(zip(free, ready, strict=False))
                ready = ready[len(started) :]
                self.append(self.start(started), list(started))
            if len(free) == len(self.responses):
                break
            self.append(self.step(), list(range(len(self.responses))))

    def prefill(self, prompts: list[Ids]) -> None:
        """Compute prompts for `start`; none may be longer than those before."""
        ids_PL, mask_PL = _pad_left(prompts, self.device)
        self.prompts: Any = DynamicCache()  # without the config, whose sliding windows would drop columns
        self.lengths, self.width = [len(prompt) for prompt in prompts], ids_PL.shape[1]
        self.logits_PV = self._forward(ids_PL, mask_PL, (mask_PL.cumsum(-1) - 1).clamp(min=0), self.prompts)
        if self.cache is None:
            self.cache = Cache(layers=[Layer(self, layer) for layer in self.prompts.layers])
            self.cursor, self.starts = self.width, [self.width] * len(self.starts)
            self._resize(list(range(len(self.starts))))

    def start(self, started: dict[int, tuple[int, Ids]]) -> Tensor:
        """Start in each row the response to a prompt of the last `prefill`; logits_RV of the first tokens."""
        index_R, index_P = torch.tensor([[row, prompt] for row, (prompt, _) in started.items()], device=self.device).T
        columns = slice(self.cursor - self.width, self.cursor)
        for layer, prompts in zip(self.cache.layers, self.prompts.layers, strict=True):
            layer.keys[index_R, :, columns] = prompts.keys[index_P].to(layer.keys.dtype)
            layer.values[index_R, :, columns] = prompts.values[index_P]
        for row, (prompt, ids) in started.items():
            self.starts[row], self.responses[row] = self.cursor - self.lengths[prompt], ids
        return self.logits_PV[index_P]

    def step(self) -> Tensor:
        """Compute the newest token of every row; logits_RV of the next ones."""
        taken = [row for row, ids in enumerate(self.responses) if ids is not None]
        if self.cursor == self.columns or len(taken) < 0.75 * len(self.responses):  # not at once: it copies the buffers
            self._resize(taken)
        self.first = min(self.starts)
        newest = [ids[-1] if ids else 0 for ids in self.responses]
        token_R, start_R = torch.tensor([newest, self.starts], device=self.device)
        mask_RC = torch.arange(self.first, self.cursor + 1, device=self.device) >= start_R[:, None]
        logits_RV = self._forward(token_R[:, None], mask_RC, (self.cursor - start_R)[:, None], self.cache)
        self.cursor += 1
        return logits_RV

    def append(self, logits_RV: Tensor, rows: list[int]) -> None:
        """Sample a token for each of these rows, and free the rows whose response ends."""
        for row, token in zip(rows, sample_tokens(logits_RV, self.sampling).tolist(), strict=True):
            if (ids := self.responses[row]) is not None:
                ids.append(token)
                if self.ended(ids):
                    self.responses[row] = None
                    self.starts[row] = self.cursor  # the positions of a free row must not exceed the model's

    def _forward(self, ids_RL: Tensor, mask_RC: Tensor, position_RL: Tensor, cache: Cache) -> Tensor:
        inputs = {"input_ids": ids_RL, "attention_mask": mask_RC.long(), "position_ids": position_RL}
        return self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _resize(self, rows: list[int]) -> None:
        """Keep only these rows, and the columns that they or the next prompts use; make room for more columns."""
        first = min([self.starts[row] for row in rows] + [self.cursor - self.width])
        used = self.cursor - first
        self.columns = used + max(32, used // 4)
        index_R = torch.tensor(rows, device=self.device)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                kept_RHCD = getattr(layer, name)[index_R, :, first : self.cursor]
                # zeros, because a masked value is multiplied by 0, which does not remove NaN
                setattr(layer, name, F.pad(kept_RHCD, (0, 0, 0, self.columns - kept_RHCD.shape[2])))
        self.responses = [self.responses[row] for row in rows]
        self.starts, self.cursor = [self.starts[row] - first for row in rows], used


class Layer(DynamicLayer):
    """Keys and values of one decoder layer for all rows; as yet without columns."""

    def __init__(self, rows: Rows, prompts: Any):
        super().__init__()
        self.rows, self.is_initialized = rows, True
        repeat = [0] * len(rows.starts)
        # under autocast, rotary embeddings return float32 keys, but attention computes in the type of the values
        self.keys: Any = prompts.keys[repeat, :, :0].to(prompts.values.dtype)
        self.values: Any = prompts.values[repeat, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        first, cursor = self.rows.first, self.rows.cursor
        self.keys[:, :, cursor : cursor + 1] = key_states
        self.values[:, :, cursor : cursor + 1] = value_states
        return self.keys[:, :, first : cursor + 1], self.values[:, :, first : cursor + 1]

    def get_seq_length(self) -> int:
        return self.rows.cursor - self.rows.first


def sample_tokens(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """A token of each row, [R]: temperature, then top-k, then top-p, in the order of transformers."""
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV, token_RV = logits_RV.float() / sampling.temperature, None
    vocabulary = scores_RV.shape[1]
    if 0 < sampling.top_k < vocabulary or sampling.top_p < 1:
        scores_RV, token_RV = scores_RV.topk(min(sampling.top_k or vocabulary, vocabulary))  # likeliest first
    share_RV = scores_RV.softmax(-1)
    if sampling.top_p < 1:
        share_RV = share_RV.masked_fill(share_RV.cumsum(-1) - share_RV >= sampling.top_p, 0.0)
    if share_RV.is_cuda:  # where a cumulative sum along a row is not deterministic
        choice_R1 = torch.multinomial(share_RV, 1)
    else:  # one random number a row instead of one a token: 7 times as fast
        sum_RV = share_RV.cumsum(-1, dtype=torch.float64)
        random_R1 = torch.rand(len(sum_RV), 1, dtype=torch.float64, device=sum_RV.device)
        choice_R1 = torch.searchsorted(sum_RV, random_R1 * sum_RV[:, -1:], right=True)
    return (choice_R1 if token_RV is None else token_RV.gather(1, choice_R1))[:, 0]


def _pad_left(prompts: list[Ids], device: torch.device) -> tuple[Tensor, ...]:
    rows = [torch.tensor([ids, [1] * len(ids)]).T for ids in prompts]
    return pad_sequence(rows, batch_first=True, padding_side="left").to(device).unbind(-1)


def _decode_together(policy: Policy, jobs: list[tuple[Ids, list[Ids]]], rows: int, sampling: Sampling) -> None:
    """Extend the empty responses by transformers' `generate`, which waits for the longest of each batch."""
    model: Any = policy.model
    ended, pairs = end_of_response(policy, sampling), [(prompt, ids) for prompt, empty in jobs for ids in empty]
    warnings.warn(f"{type(model).__name__} caches more than keys and values: its rows are not refilled", stacklevel=2)

    def draw(_, logits_RV: Tensor) -> Tensor:
        return torch.full_like(logits_RV, -torch.inf).scatter(1, sample_tokens(logits_RV, sampling)[:, None], 0.0)

    def stop(ids_RL: Tensor, _) -> Tensor:
        done = [stop_requested.is_set() or ended(ids) for ids in ids_RL[:, width:].tolist()]
        return torch.tensor(done, device=ids_RL.device)

    # instead of the model's own, which `sample` restores
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=sampling.max_new_tokens)
    # synced_gpus: every rank has all weights, so ranks with fewer prompts must not wait for the others
    options: Any = {"logits_processor": [draw], "stopping_criteria": [stop], "synced_gpus": False}
    while pairs and not stop_requested.is_set():
        batch, pairs = pairs[:rows], pairs[rows:]
        ids_PL, mask_PL = _pad_left([prompt for prompt, _ in batch], policy.device)
        width = ids_PL.shape[1]
        output_RL = model.generate(ids_PL, attention_mask=mask_PL, **options)
        for (_, response), ids in zip(batch, output_RL[:, width:].tolist(), strict=True):
            response += ids[: first_end(ids, ended)]
