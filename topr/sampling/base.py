"""What samplers share: parameters, the response, the interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)

from topr.io.settings import Configurable
from topr.policy.model import Policy

Ids = list[int]
TopP: Any = restricted_number_type("TopP", float, [(">", 0), ("<=", 1)])
Stop: Any = restricted_string_type("Stop", "(?s).+")


@dataclass
class Sampling:
    """Sampling parameters; the defaults are the paper's.

    Args:
        temperature: 0 is greedy.
        top_k: sample from the k likeliest tokens only; 0 turns it off.
        top_p: sample from the likeliest tokens that together have this probability; 1 turns it off.
        max_new_tokens: longest response, its end token included.
        stop: strings that end a response; the text after them is neither sampled nor graded.
    """

    temperature: NonNegativeFloat = 1.0
    top_k: NonNegativeInt = 500
    top_p: TopP = 1.0
    max_new_tokens: PositiveInt = 512
    stop: list[Stop] = field(default_factory=list)


class Response(NamedTuple):
    """The token ids of a response, its end token included."""

    ids: Ids
    finished: bool  # the last id is an end token
    log_probs: tuple[float, ...] = ()  # of each id, by the server that sampled it


class Sampler(Configurable, ABC):
    """Turns prompts into responses, both as token ids."""

    in_process = True  # whether it samples from the weights in this process

    @abstractmethod
    def sample(
        self,
        policy: Policy,
        prompts: list[Ids],
        n: int,
        sampling: Sampling,
        seed: int,
        prompt_indices: Sequence[int] = (),
    ) -> list[list[Response]]:
        """Sample n responses to each prompt; global random generators keep their states.

        Args:
            policy: the model to sample from, in eval mode.
            prompts: token ids of each prompt, at least one.
            n: responses to each prompt.
            sampling: temperature, top-k, top-p, and where responses end.
            seed: a response depends on the seed, on its prompt's index, and on its own place among
                the n responses. It does not depend on the prompts beside it.
            prompt_indices: the index of each prompt in a larger whole; by default 0, 1, …

        Returns:
            The responses to each prompt, fewer than n if sampling was stopped.
        """

    def begin(self, *arguments) -> Callable[[], list[list[Response]]]:
        """A function that returns what `sample` does. A server begins at once."""
        return partial(self.sample, *arguments)
