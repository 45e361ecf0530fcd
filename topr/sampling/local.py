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

Shapes: R rows, C columns, P prompts, L their length, H key/value heads, D their width,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse.typing import PositiveInt
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from topr.io import InputError
from topr.io.distributed import stop_requested
from topr.policy import Policy
from topr.sampling.base import Ids, Response, Sampler, Sampling

PREFILL = 512  # tokens of prompts that are computed at once
BLOCK = 256  # tokens of the vocabulary whose probabilities are added first


class LocalSampler(Sampler):
    """Samples in this process. A requested stop returns the responses so far, also unfinished ones.

    Args:
        rows: at most this many responses are decoded side by side; fewer if no more fit into a
            GPU's memory.
    """

    def __init__(self, rows: PositiveInt = 512):
        self.rows = rows

    @torch.no_grad()
    def sample(self, policy, prompts, n, sampling, seed, prompt_indices=()) -> list[list[Response]]:
        layer_types = getattr(policy.model.config, "layer_types", None) or []
        if policy.model._is_stateful or "conv" in layer_types:  # Mamba or LFM2, for example
            raise InputError(
                f"policy {policy.name!r} caches more than keys and values",
                "sample on a server, with data.val and data.test null",
            )
        groups = []  # the n drafts of each prompt
        for prompt, index in zip(prompts, prompt_indices or range(len(prompts)), strict=True):
            draws = np.random.default_rng([seed, index]).random((n, sampling.max_new_tokens))
            groups.append([Draft(prompt, iter(draws_of_one)) for draws_of_one in draws])
        Rows(policy, sampling, groups, self.rows).decode()

        responses = []
        for group in groups:
            begun = [draft.ids for draft in group if draft.ids]
            responses.append([Response(ids, ids[-1] in policy.end_tokens) for ids in begun])
        return responses


@dataclass(eq=False)
class Draft:
    """A response that is being sampled."""

    prompt: Ids
    draws: Iterator[float]  # a uniform random number for each token
    ids: Ids = field(default_factory=list)
    ended: bool = False  # its row is free

    @property
    def length(self):
        """The columns of its row; its newest token has none yet."""
        return 0 if self.ended else len(self.prompt) + len(self.ids) - 1


class Rows:
    """Responses decoded side by side; see the top of this file.

    Args:
        policy: the model to sample from.
        sampling: sampling parameters.
        groups: the `Draft`s to extend, those of each prompt together.
        most: responses side by side.
    """

    def __init__(self, policy, sampling, groups, most):
        self.policy = policy
        self.sampling = sampling
        self.is_end = end_of_response(policy, sampling)
        # The longest first: the columns before the cursor then have room for every later prompt.
        self.queue = sorted(groups, key=lambda group: len(group[0].prompt), reverse=True)
        self.waiting: list = []  # with their prompts' places in prompt_states
        self.most = min(most, sum(map(len, groups)))
        free = Draft(prompt=[], draws=iter([]), ids=[0], ended=True)
        self.drafts = [free]  # of each row; a row is free when its draft has ended
        self.states: list = []  # keys of a layer, its values, keys of the next, …, [R, H, C, D]

    def decode(self):
        """Extend every draft to its end, or until a stop is requested."""
        while not stop_requested.is_set():
            free = [row for row, draft in enumerate(self.drafts) if draft.ended]
            if free and self.waiting:
                self.start(free)
            elif free and self.queue:
                self.prefill()
            elif len(free) < len(self.drafts):
                self.step()
            else:
                return

    def prefill(self):
        """Compute the next prompts of equal length. The first call makes the rows."""
        self.prompt_width = len(self.queue[0][0].prompt)
        equal = [group for group in self.queue if len(group[0].prompt) == self.prompt_width]
        equal = equal[: max(1, PREFILL // self.prompt_width)]
        del self.queue[: len(equal)]
        self.waiting = [(place, draft) for place, group in enumerate(equal) for draft in group]
        ids_PL = self.to_device([group[0].prompt for group in equal])
        # Made without the model's config, whose sliding windows would drop columns.
        cache: Any = DynamicCache()
        self.prompt_logits_PV = self.forward(ids_PL, None, None, cache)
        # Under autocast, attention computes in the type of the logits; rotary embeddings return
        # float32.
        dtype = self.prompt_logits_PV.dtype
        self.prompt_states = [  # in the order of `states`, [P, H, L, D]
            states_PHLD.to(dtype)
            for layer in cache.layers
            for states_PHLD in (layer.keys, layer.values)
        ]
        if not self.states:
            self.allocate()

    def allocate(self):
        """Make as many rows as are wanted and fit into a GPU's memory."""
        rows = self.most
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.policy.device)
            longest = self.prompt_width + self.sampling.max_new_tokens
            column = sum(states_PHLD[0, :, 0].nbytes for states_PHLD in self.prompt_states)
            # A quarter is for `resize`, the rest for logits and the layers' own tensors.
            rows = max(1, min(rows, int(free / (1.6 * longest * column))))
        self.cursor = self.prompt_width  # the column to write next
        self.longest = 0  # row, in columns
        self.states = [*self.prompt_states]  # a copy: `resize` replaces one after the other
        self.layers = [RowLayer(self, i) for i in range(0, len(self.states), 2)]
        # At first every row is free, and holds a copy of the first prompt.
        self.resize([0] * rows)

    def start(self, free):
        """Copy prompts into free rows, and sample the first tokens of their responses."""
        places, drafts = zip(*self.waiting[: len(free)], strict=True)
        del self.waiting[: len(free)]
        row_R = self.to_device(free[: len(drafts)])
        place_R = self.to_device(places)
        columns = slice(self.cursor - self.prompt_width, self.cursor)
        for states_RHCD, states_PHLD in zip(self.states, self.prompt_states, strict=True):
            states_RHCD[row_R, :, columns] = states_PHLD[place_R]
        for row, draft in zip(free, drafts, strict=False):
            self.drafts[row] = draft
        self.append(drafts, self.prompt_logits_PV[place_R])

    def step(self):
        """Compute the newest token of every row, and sample the next one."""
        self.longest = max(draft.length for draft in self.drafts)
        taken = [row for row, draft in enumerate(self.drafts) if not draft.ended]
        # Free rows are not dropped at once, because that copies all states.
        if self.cursor == self.columns or len(taken) < 0.75 * len(self.drafts):
            self.resize(taken)
        token_R = self.to_device([draft.ids[-1] for draft in self.drafts])
        length_R1 = self.to_device([draft.length for draft in self.drafts])[:, None]
        distance_C = torch.arange(self.longest, -1, -1, device=token_R.device)  # from the cursor
        mask_RC = (distance_C <= length_R1).long()
        logits_RV = self.forward(token_R[:, None], mask_RC, length_R1, Cache([*self.layers]))
        self.cursor += 1
        self.append(self.drafts, logits_RV)

    def forward(self, ids_RL, mask_RC, position_RL, cache):
        """The logits after the last of these tokens, [R, V]; the cache then holds the tokens."""
        output = self.policy.model(
            input_ids=ids_RL,
            attention_mask=mask_RC,
            position_ids=position_RL,
            past_key_values=cache,
            use_cache=True,
            # as an index: a slice of several tokens would copy the head's weights for each row
            logits_to_keep=self.to_device([ids_RL.shape[1] - 1]),
        )
        return output.logits[:, -1]

    def append(self, drafts, logits_RV):
        """Sample the next token of each draft. A draft that ends frees its row."""
        draw_R = self.to_device([next(draft.draws, 0.0) for draft in drafts])
        tokens = sample_tokens(logits_RV, draw_R, self.sampling).tolist()
        for draft, token in zip(drafts, tokens, strict=True):
            if not draft.ended:
                draft.ids.append(token)
                draft.ended = self.is_end(draft.ids)

    def resize(self, rows):
        """Keep these rows, and the columns that they or the next prompts need; add free columns."""
        self.drafts = [self.drafts[row] for row in rows]
        used = max(self.longest, self.prompt_width)
        self.columns = used + max(32, used // 4)
        row_R = self.to_device(rows)
        for place, states_RHCD in enumerate(self.states):
            kept_RHCD = states_RHCD[row_R, :, self.cursor - used : self.cursor]
            # Zeros, because a masked value is multiplied by 0, which does not remove NaN.
            self.states[place] = F.pad(kept_RHCD, (0, 0, 0, self.columns - used))
        self.cursor = used

    def to_device(self, numbers):
        """Numbers as float64 or int64 on the policy's device; a GPU keeps computing meanwhile."""
        return torch.from_numpy(np.array(numbers)).to(self.policy.device, non_blocking=True)


class RowLayer(DynamicLayer):
    """Keys and values of one decoder layer.

    Args:
        place: of its keys in `rows.states`; its values follow.
    """

    def __init__(self, rows, place):
        super().__init__()
        self.rows = rows
        self.place = place

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the newest column; keys and values of the columns in use."""
        rows = self.rows
        used = []
        for i, newest_RH1D in enumerate((key_states, value_states), self.place):
            used_RHCD = rows.states[i][:, :, rows.cursor - rows.longest : rows.cursor + 1]
            used_RHCD[:, :, -1:] = newest_RH1D
            used.append(used_RHCD)
        return used

    def get_seq_length(self):
        return self.rows.longest


def sample_tokens(logits_RV: Tensor, draw_R: Tensor, sampling: Sampling) -> Tensor:
    """A token of each row, [R], by its uniform random number: the first token at which the sum of
    the probabilities exceeds that number. Temperature, top-k, top-p, in transformers' order."""
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV = logits_RV.float() / sampling.temperature
    vocabulary = scores_RV.shape[1]
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    likeliest_first = top_k < vocabulary or sampling.top_p < 1
    if likeliest_first:
        scores_RV, token_RV = scores_RV.topk(top_k)
    share_RV = scores_RV.softmax(-1)
    if sampling.top_p < 1:
        likelier_RV = share_RV.cumsum(-1) - share_RV
        share_RV = share_RV.masked_fill(likelier_RV >= sampling.top_p, 0.0)
    # in two steps, because a running sum over a vocabulary takes long
    share_RBK = F.pad(share_RV, (0, -share_RV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block_R1, draw_R1 = pick(share_RBK.sum(-1), draw_R[:, None])
    place_R1, _ = pick(share_RBK.take_along_dim(block_R1[..., None], 1)[:, 0], draw_R1)
    choice_R1 = block_R1 * BLOCK + place_R1
    if likeliest_first:
        choice_R1 = token_RV.gather(1, choice_R1)
    return choice_R1[:, 0]


def pick(share_RK: Tensor, draw_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row at which the sum of its shares exceeds so much of their total,
    and the draw within that place, again uniform from 0 to 1; both [R, 1]."""
    sum_RK = share_RK.cumsum(-1, dtype=torch.float64)
    drawn_R1 = draw_R1 * sum_RK[:, -1:]
    place_R1 = torch.searchsorted(sum_RK, drawn_R1, right=True)
    share_R1 = share_RK.gather(1, place_R1)
    before_R1 = sum_RK.gather(1, place_R1) - share_R1
    return place_R1, (drawn_R1 - before_R1) / share_R1


def end_of_response(policy: Policy, sampling: Sampling) -> Callable[[Ids], bool]:
    """The test for the end: an end token, a complete stop string, or max_new_tokens."""
    end_tokens = policy.end_tokens
    # The last tokens: each may hold a single byte, and the first ones a part of a character.
    window = 4 + len("".join(sampling.stop).encode())

    def ended(ids):
        if ids[-1] in end_tokens or len(ids) == sampling.max_new_tokens:
            return True
        if not sampling.stop:
            return False
        text = policy.tokenizer.decode(ids[-window:])
        return any(stop in text for stop in sampling.stop)

    return ended
