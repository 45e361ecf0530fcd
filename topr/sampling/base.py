"""What every sampler shares: sampling parameters, the response, the interface, and where a response ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jsonargparse.typing import (
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)

from topr.distributed import Progress
from topr.policy import Policy

Ids = list[int]
# lower temperatures overflow the logits
Temperature: Any = restricted_number_type(
    "Temperature", float, [("==", 0), (">=", 1e-4)], join="or"
)
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

    temperature: Temperature = 1.0
    top_k: NonNegativeInt = 500
    top_p: TopP = 1.0
    max_new_tokens: PositiveInt = 512
    stop: list[Stop] = field(default_factory=list)


class Response(NamedTuple):
    ids: Ids
    finished: bool  # the last id is an end token


class Sampler(ABC):
    progress = Progress()  # `sample` advances it

    @abstractmethod
    def sample(
        self,
        policy: Policy,
        prompts: list[Ids],
        n: int,
        sampling: Sampling,
        seed: int,
        numbers: Sequence[int] = (),
    ) -> list[list[Response]]:
        """n responses to each prompt; global random generators keep their states. `numbers` are those of the prompts
        in a larger whole (0, 1, … by default): a response depends on the seed, its prompt's number and its own place
        alone. A prompt has fewer if the sampler drops responses whose token ids are not certain; it then warns."""


def end_of_response(policy: Policy, sampling: Sampling) -> Callable[[Ids], bool]:
    """The test for the end of a response: an end token, a complete stop string, or max_new_tokens."""
    ends, stop, tokenizer = policy.end_tokens, sampling.stop, policy.tokenizer
    window = (
        max((len(text.encode()) for text in stop), default=0) + 4
    )  # tokens; one may hold a single byte

    def ended(ids: Ids) -> bool:
        if ids[-1] in ends or len(ids) == sampling.max_new_tokens:
            return True
        # the whole text decides; it is decoded only if its end contains a stop string
        return bool(stop) and all(
            any(text in tokenizer.decode(part) for text in stop) for part in (ids[-window:], ids)
        )

    return ended


def first_end(ids: Ids, ended: Callable[[Ids], bool]) -> int | None:
    """The length at which ids end for the first time; None if they do not end."""
    return next((length for length in range(1, len(ids) + 1) if ended(ids[:length])), None)
