"""Rows of tokens: trajectories without padding, a prompt once for all its responses.

Shapes: B trajectories, L tokens of the row that holds them, N response tokens laid end to end.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy

from topr.attention import Span


class Tokens(NamedTuple):
    """Trajectories in one row of tokens: a prompt, each of its responses, the next prompt, and so on.

    A response's positions continue its prompt's.
    """

    input_ids_L: Tensor
    position_ids_L: Tensor
    trajectories: tuple[Span, ...]  # start and end of each response, start and end of its prompt
    position_N: Tensor  # place in the row of the token that predicts each response token
    target_N: Tensor  # the response tokens
    length_B: Tensor  # response tokens of each trajectory
    count: int  # prompt + response tokens of all trajectories; shared prompts count once for each response

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each trajectory, known without waiting for a device."""
        return [end - start for start, end, *_ in self.trajectories]

    @property
    def spans(self) -> tuple[Span, ...]:
        """What each token attends to."""
        spans, sharing = [], Counter(first for *_, first, _ in self.trajectories)
        for start, end, first, last in self.trajectories:
            if sharing[first] == 1:  # prompt and response are one text
                spans.append((first, end, first, first))
                continue
            if start == last:
                spans.append((first, last, first, first))
            spans.append((start, end, first, last))
        return tuple(spans)

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(*(field.to(device) if isinstance(field, Tensor) else field for field in self))


def pack(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Tokens:
    """Lay out B prompts and their responses, arrays of token ids, none of them empty.

    Neighbours with equal prompts share one.
    """
    ids, positions, trajectories, predicting = [], [], [], []
    first = last = end = 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not i or not np.array_equal(prompt, prompts[i - 1]):
            first, end = end, end + len(prompt)
            last = end
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
        start, end = end, end + len(response)
        trajectories.append((start, end, first, last))
        ids.append(response)
        positions.append(np.arange(len(prompt), len(prompt) + len(response)))
        # the first response token is predicted by the prompt's last, each other by the one before it
        predicting.append(np.r_[last - 1, start : end - 1])
    row, target = np.concatenate(ids).astype(np.int64), np.concatenate(responses).astype(np.int64)
    return Tokens(
        from_numpy(row),
        from_numpy(np.concatenate(positions)),
        tuple(trajectories),
        from_numpy(np.concatenate(predicting)),
        from_numpy(target),
        torch.tensor([len(response) for response in responses]),
        sum(map(len, prompts)) + len(target),
    )


def partition(sizes: np.ndarray, tokens: int = 0, parts: int = 0, unit: int = 1) -> list[np.ndarray]:
    """Split trajectories into rows, as few as `tokens` allows or `parts` balanced ones, equal prompts side by side.

    Args:
        sizes: of each trajectory a number, equal for equal prompts, its prompt tokens, its response tokens; [3, B].
        tokens: bound on the tokens of a row.
        parts: number of rows; the bound is then the least that this number allows, and empty rows fill up.
        unit: this many neighbours stay together (the two of a pair).

    Returns:
        Trajectories by number, one array a row.
    """
    prompt, prompt_length, length = sizes.reshape(3, -1, unit)
    order = np.argsort(prompt[:, 0], kind="stable")
    again = (prompt[:, 1:] != prompt[:, :-1]) * prompt_length[:, 1:]  # another prompt within a unit
    own = (length.sum(axis=1) + again.sum(axis=1))[order].tolist()
    leading = prompt_length[order, 0].tolist()  # what a unit's prompt adds to a new row, and behind other units
    shared = prompt[order[1:], 0] == prompt[order[:-1], -1]
    following = [0, *np.where(shared, 0, prompt_length[order[1:], 0]).tolist()]

    def starts(bound: int) -> list[int]:
        found, used = [0], own[0] + leading[0]
        for i in range(1, len(own)):
            used += own[i] + following[i]
            if used > bound:
                found.append(i)
                used = own[i] + leading[i]
        return found

    if parts:
        low, high = max(map(sum, zip(own, leading, strict=True))), sum(own) + sum(leading)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(starts(middle)) <= parts else (middle + 1, high)
        tokens = low
    rows = np.split(order, starts(tokens)[1:])
    rows = [(row[:, None] * unit + np.arange(unit)).ravel() for row in rows]
    return rows + [np.empty(0, dtype=np.int64)] * (parts - len(rows))
