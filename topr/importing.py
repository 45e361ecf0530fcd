"""Import of users' files into the trajectory format."""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topr.io import InputError
from topr.losses import LARGEST
from topr.policy import end_tokens, load_policy, own_device
from topr.policy_files import vocabulary_and_context
from topr.rows import load_rows
from topr.tokenizer import encode, encode_prompt, load_tokenizer, provenance
from topr.trajectories import Trajectory, add_log_probs, write_trajectories

OPTIONAL = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "valid": (bool,),
    "answer": (str, int, float),
    "gold": (str, int, float),
}
REWARDS = {"reward": (bool, int, float), "score": (bool, int, float), "label": (bool,)}  # a label of 0 would be no -1
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Format:
    """A way to write responses with their rewards, recognised by the keys of an entry.

    Args:
        name: what sentences call it.
        prompt: key of the prompt; None if every response is a conversation that begins with it.
        responses: the key of each response with the key of its reward, or with the reward itself.
        gold: key of the reference answer.
        also: a key of other formats that entries may hold, without a meaning here.
        lost: what its writer leaves out, told to the user.
    """

    name: str
    prompt: str | None
    responses: dict[str, str | float]
    gold: str = "gold"
    also: str = ""
    lost: str = ""

    @property
    def keys(self) -> list[str]:
        """What an entry of this format holds."""
        return [key for key in (self.prompt, *self.responses, *self.responses.values()) if isinstance(key, str)]


CUT = "responses that were cut off are not marked, and all are taken as finished unless `finished` says otherwise"
FORMATS = (
    Format("prompt and response", "prompt", {"response": "reward"}),
    Format("conversation", None, {"messages": "reward"}),
    # huggingface.co/docs/trl/dataset_formats: unpaired preference, preference with explicit and implicit prompt
    Format("TRL's unpaired preference", "prompt", {"completion": "label"}),
    Format("TRL's preference", "prompt", {"chosen": 1.0, "rejected": -1.0}),
    Format("TRL's preference with implicit prompt", None, {"chosen": 1.0, "rejected": -1.0}),
    # github.com/volcengine/verl, verl/trainer/ppo/ray_trainer.py, _dump_generations; `reward` in validation dumps
    Format(
        "verl's dump",
        "input",
        {"output": "score"},
        gold="gts",
        also="reward",
        lost="prompts stand without their special tokens, so that log mu of a chat model is that of another prompt; "
        + CUT,
    ),
    # github.com/OpenRLHF/OpenRLHF, openrlhf/cli/batch_inference.py, --eval_task rm
    Format("OpenRLHF's dump", "input", {"output": "reward"}, lost=CUT),
)


def import_file(
    source: str | Path, policy: str, out: str | Path, microbatch_tokens: int, precision: str = "32-true"
) -> int:
    """Tokenise a file of one of `FORMATS` with the policy's tokenizer and score log mu with its forward.

    A text prompt is tokenised with special tokens, chat messages by the tokenizer's template, the response without
    either; `finished` (default true) appends the end token, unless the response brings one, and trains it. Boolean
    rewards become +-1. The keys of `OPTIONAL` are kept.

    Args:
        source: JSON lines, Parquet, or a hub data set; see `load_rows`.
        policy: the policy that sampled the responses, folder or hub name.
        out: trajectory file to write.
        microbatch_tokens: tokens of one forward.
        precision: 32-true or bf16-mixed, of the scoring forward; best that of the training to come.

    Returns:
        How many trajectories were left out because they are longer than the context or `microbatch_tokens`.

    Raises:
        InputError: an entry is malformed, of no or several formats, or empty, or nothing is short enough.
    """
    tokenizer, (vocabulary, context) = load_tokenizer(policy), vocabulary_and_context(policy)
    context = min(microbatch_tokens, context)
    trajectories, lost, ignored = [], {}, set()
    for number, row in enumerate(load_rows(source, {}, OPTIONAL), start=1):
        where, row = f"{source}, entry {number}", {key: value for key, value in row.items() if value is not None}
        form = _recognise(row, where)
        lost[form.name] = form.lost
        ignored |= row.keys() - {*form.keys, form.gold, form.also, *OPTIONAL}
        for prompt, response, reward in _responses(row, form, where):
            try:
                text, ids = encode_prompt(prompt, tokenizer)
                response_ids = encode(response, tokenizer, special=False)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            if not ids:
                raise InputError(f"{where}: the prompt is empty; drop the entry")
            if not all(0 <= token < vocabulary for token in ids + response_ids):
                raise InputError(
                    f"{where}: the tokenizer of policy {policy!r} gives ids beyond the model's vocabulary of "
                    f"{vocabulary}; take the model's own"
                )
            if not response_ids and not row.get("finished", True):
                raise InputError(f"{where}: the response is empty; drop the entry")
            trajectories.append(_trajectory(text, ids, response, response_ids, reward, row, form))
    with own_device():
        model = load_policy(policy)
    ends = end_tokens(model, tokenizer)
    for trajectory in trajectories:
        _end(trajectory, tokenizer, ends)
    short = [t for t in trajectories if len(t.prompt_ids) + len(t.response_ids) <= context]
    if not short:
        raise InputError(
            f"{source}: every entry has more tokens than the policy's context or --microbatch-tokens allow "
            f"({context}); raise the bound or shorten the entries"
        )
    _warn(source, lost, ignored, short, len(trajectories) - len(short), context, tokenizer)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        add_log_probs(model, short, microbatch_tokens)
    write_trajectories(out, short, provenance(policy, tokenizer, precision))
    return len(trajectories) - len(short)


def _recognise(row: dict[str, Any], where: str) -> Format:
    """The one format that accounts for the keys of every format that fits."""
    fits = [form for form in FORMATS if row.keys() >= set(form.keys)]
    best = [form for form in fits if all({*form.keys, form.also} >= set(other.keys) for other in fits)]
    missing = {key for form in FORMATS for key in set(form.keys) - row.keys() if len(set(form.keys) - row.keys()) == 1}
    if not fits and missing:
        raise InputError(
            f"{where}: {' or '.join(map(repr, sorted(missing)))} is missing or null; add it or drop the entry"
        )
    if len(best) != 1:
        raise InputError(
            f"{where}: the keys {', '.join(sorted(map(repr, row))[:9]) or '(none)'} are those of "
            f"{' and of '.join(form.name for form in fits) or 'no format'}; expected those of one: "
            + "; ".join(", ".join(form.keys) for form in FORMATS)
        )
    return best[0]


def _responses(row: dict[str, Any], form: Format, where: str) -> list[tuple[str | list[dict], str, float]]:
    """(prompt, response, reward) of each trajectory that an entry holds."""
    found = []
    for key, reward in form.responses.items():
        prompt, response = _exchange(row.get(form.prompt), row[key], key, where)
        if isinstance(reward, str):
            name, reward = reward, row[reward]
            if not isinstance(reward, REWARDS[name]):
                names = " or ".join(kind.__name__ for kind in REWARDS[name])
                raise InputError(f"{where}: key {name!r} must hold {names}, found {type(reward).__name__}")
            if not abs(reward) <= LARGEST:
                raise InputError(f"{where}: the reward {reward!r:.20} is not between -{LARGEST:.0f} and {LARGEST:.0f}")
            reward = 2.0 * reward - 1 if isinstance(reward, bool) else float(reward)
        found.append((prompt, response, reward))
    if any(prompt != found[0][0] for prompt, _, _ in found):
        raise InputError(f"{where}: {' and '.join(form.responses)} must differ in their last message alone")
    return found


def _exchange(prompt: Any, response: Any, key: str, where: str) -> tuple[str | list[dict], str]:
    """Prompt, as text or messages, and text of the response, cut off the conversation if they come as one."""
    if not isinstance(response, str):
        messages = _messages(response, key, where)
        # some data sets give the question once more beside the conversations
        if prompt is None or prompt in [message["content"] for message in messages[:-1]]:
            prompt, messages = messages[:-1], messages[-1:]
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise InputError(f"{where}: key {key!r} must end in the one assistant message that has the reward")
        response = messages[0]["content"]
    elif prompt is None:
        raise InputError(f"{where}: key {key!r} holds text, which does not say where its prompt ends; add 'prompt'")
    if not isinstance(prompt, str):
        prompt = _messages(prompt, "prompt", where)
        if prompt[-1]["role"] == "assistant":
            raise InputError(f"{where}: the prompt ends in an assistant message; the response must answer another role")
    return prompt, response


def _messages(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    """Chat messages, without the null keys that Parquet adds to some columns and not to others."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        found = "no message" if value == [] else type(value).__name__
        raise InputError(f"{where}: key {key!r} must hold text or chat messages, found {found}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise InputError(f"{where}: a message of {key!r} is no object with a role and a text as content")
        if message.get("role") not in ROLES:
            raise InputError(
                f"{where}: a message of {key!r} has the role {message.get('role')!r:.50}; expected {', '.join(ROLES)}"
            )
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def _trajectory(
    prompt: str, prompt_ids: list[int], response: str, response_ids: list[int], reward: float, row: dict, form: Format
) -> Trajectory:
    """One response, without its end token."""
    # by its text, so that a prompt is the same in every file
    prompt_id = str(row.get("prompt_id", f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()[:12]}"))
    kept = {"answer": row.get("answer"), "gold": row.get(form.gold, row.get("gold"))}
    return Trajectory(
        prompt_id=prompt_id,
        group=str(row.get("group", prompt_id)),
        prompt=prompt,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        ref_logprobs=[],
        reward=reward,
        finished=row.get("finished", True),
        valid=row.get("valid"),
        **{key: str(value) for key, value in kept.items() if isinstance(value, OPTIONAL[key])},
    )


def _end(trajectory: Trajectory, tokenizer, ends: set[int]) -> None:
    """Give a finished response exactly one end token, in place."""
    ids = trajectory.response_ids
    while ends & set(ids[:-1]) and not tokenizer.decode(ids[-1]).strip():
        ids.pop()  # the line break that a template writes after a turn, which nobody sampled
    if trajectory.finished and not ends & set(ids[-1:]):
        ids.append(tokenizer.eos_token_id)


def _warn(
    source: str | Path,
    lost: dict[str, str],
    ignored: set[str],
    trajectories: list[Trajectory],
    left_out: int,
    context: int,
    tokenizer,
) -> None:
    """One line for each thing that the user should know."""
    empty = sum(not t.response for t in trajectories)
    unknown = sum(tokenizer.unk_token_id in t.prompt_ids + t.response_ids for t in trajectories)
    for happened, sentence in (
        *((what, f"in {name} {what}") for name, what in lost.items()),
        (ignored, f"keys that mean nothing here are ignored: {', '.join(sorted(ignored))}"),
        (empty, f"{empty} responses are empty and train their end token alone"),
        (unknown, f"{unknown} trajectories hold text that the tokenizer does not know"),
        (
            left_out,
            f"{left_out} of {left_out + len(trajectories)} trajectories are left out: they have more tokens than the "
            f"policy's context or --microbatch-tokens allow ({context})",
        ),
    ):
        if happened:
            warnings.warn(f"{source}: {sentence}", stacklevel=3)
