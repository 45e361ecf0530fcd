"""Import of users' files: recognise the format, tokenise, score log mu."""

import hashlib
import os
import warnings
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse.typing import PositiveInt

from topr.io import LARGEST, InputError
from topr.trajectories.file import Trajectory, write_trajectories
from topr.trajectories.rows import Row, Types, load_rows

if TYPE_CHECKING:
    from topr.policy import Policy

Precision = Literal["32-true", "bf16-mixed"]
Messages = list[dict[str, Any]]
# Keys of prompt, response and reward, the first that a row has; "": the response begins with the
# prompt. Of a pair, the better response and the worse one.
FORMATS = (
    ("prompt", "response", "reward"),
    ("", "messages", "reward"),
    ("prompt", "completion", "label"),  # huggingface.co/docs/trl/dataset_formats
    ("prompt", "chosen", "rejected"),
    ("", "chosen", "rejected"),
    ("input", "output", "score"),  # verl, trainer.rollout_data_dir
    ("input", "output", "reward"),  # OpenRLHF, batch_inference --eval_task rm
)
OPTIONAL: Types = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "valid": (bool,),
    "answer": (str, int, float),
    "gold": (str, int, float),
}


def import_files(
    files: list[str],
    policy: str,
    out: str,
    microbatch_tokens: PositiveInt = 16384,
    precision: Precision = "32-true",
) -> int:
    """Write the rows of files in one of `FORMATS` as trajectories, with log mu of a policy.

    A text prompt gets special tokens, chat messages the tokenizer's template. A finished response,
    which is the default, gets an end token unless it has one. Boolean rewards become +-1.

    Args:
        files: sources that `load_rows` takes
        policy: folder or hub name of the policy that sampled the responses
        out: trajectory file to write
        microbatch_tokens: tokens of one forward
        precision: of the forward that scores; best that of the training to come

    Returns:
        How many trajectories were left out because they are too long.

    Raises:
        InputError: for a bad row, or if no row is left.
    """
    import torch

    from topr.policy import load_policy, own_device, provenance, vocabulary_and_context
    from topr.policy.model import empty_policy
    from topr.trajectories.scoring import add_log_probs

    empty = empty_policy(policy)  # to check every row before the weights are loaded
    trajectories: list[Trajectory] = []
    for file in files:
        for number, row in enumerate(load_rows(file, {}, OPTIONAL), start=1):
            try:
                trajectories += read_row(row, empty)
            except InputError as error:
                raise InputError(f"{file}, row {number}: {error}") from error
    limit = min(microbatch_tokens, vocabulary_and_context(policy)[1])
    kept = [t for t in trajectories if len(t.prompt_ids) + len(t.response_ids) <= limit]
    if not kept:
        raise InputError(f"no row fits into {limit} tokens, --microbatch-tokens or the context")
    with own_device():
        model = load_policy(policy)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        add_log_probs(model, kept, microbatch_tokens)
    write_trajectories(out, kept, provenance(policy, precision))
    return len(trajectories) - len(kept)


def read_row(row: Row, policy: "Policy") -> list[Trajectory]:
    """The trajectories of a row, without log mu: two of a pair, none if they are equal, else one."""
    row = {key: value for key, value in row.items() if value is not None}
    prompt_key, key, reward_key = recognise(row)
    prompt = row.get(prompt_key)
    response = row[key]
    last = row[reward_key]
    if "gts" in row:  # verl's name
        row["gold"] = row["gts"]
    if key != "chosen":
        reward = read_reward(last, reward_key)
        return [tokenise(row, *split(prompt, response, key == "messages"), reward, policy)]
    if response == last:
        warnings.warn("pairs of equal responses are left out", stacklevel=2)
        return []
    if prompt is None and isinstance(response, str):
        prompt = os.path.commonprefix([response, last]).rstrip(" ")
        response = response.removeprefix(prompt)
        last = last.removeprefix(prompt)
    chosen = tokenise(row, *split(prompt, response), 1.0, policy)
    rejected = tokenise(row, *split(prompt, last), -1.0, policy)
    if chosen.prompt != rejected.prompt:
        raise InputError("chosen and rejected must differ in their last message alone")
    return [chosen, rejected]


def recognise(row: Row) -> tuple[str, str, str]:
    """The first of `FORMATS` whose keys a row has."""
    for keys in FORMATS:
        if set(keys) - {""} <= row.keys():
            return keys
    formats = "; ".join(" ".join(keys).strip() for keys in FORMATS)
    raise InputError(f"found the keys {', '.join(row)}; expected those of one: {formats}")


def read_reward(value: Any, key: str) -> float:
    """A number as it is; true is +1 and false -1."""
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if key == "label" or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        expected = "true, false" if key == "label" else f"a number up to {LARGEST:.0f}"
        raise InputError(f"key {key!r} holds {value!r:.20}, expected {expected}")
    return float(value)


def split(
    prompt: Any, response: Any, every_turn: bool = False
) -> tuple[str | Messages, str | Messages]:
    """Prompt and response; of messages, the response is the last one, or with `every_turn` all
    from the first of the assistant."""
    if prompt is None or not isinstance(response, str):
        messages = check_messages(response)
        roles = [message["role"] for message in messages]
        if roles[-1] != "assistant" or (len(roles) > 1 and isinstance(prompt, list)):
            raise InputError("messages must end in one answer of the assistant")
        first = roles.index("assistant") if every_turn else -1
        answer = messages[first]
        is_text = messages[first:] == [answer] and "tool_calls" not in answer
        response = answer["content"] if is_text else messages[first:]
        prompt = messages[:first] or prompt  # a text beside messages repeats their question
    return prompt if isinstance(prompt, str) else check_messages(prompt), response


def check_messages(value: Any) -> Messages:
    """Chat messages without the nulls that Parquet adds; an InputError if they are none."""
    messages = []
    for message in value if isinstance(value, list) and value else [None]:
        known = message if isinstance(message, dict) else {}
        known = {key: part for key, part in known.items() if part is not None}
        if "role" not in known or not known.keys() & {"content", "tool_calls"}:
            raise InputError(f"found {value!r:.60}, expected chat messages with role and content")
        messages.append(known)
    return messages


def tokenise(
    row: Row, prompt: str | Messages, response: str | Messages, reward: float, policy: "Policy"
) -> Trajectory:
    """A trajectory without log mu."""
    from topr.policy import encode, encode_prompt

    finished = row.get("finished", True)
    text, prompt_ids = encode_prompt(prompt, policy.tokenizer)
    sampled = None
    if isinstance(response, str):
        response_ids = encode(response, policy.tokenizer, special=False)
        if finished and not policy.end_tokens & set(response_ids[-1:]):
            response_ids.append(policy.tokenizer.eos_token_id)
    else:
        response, response_ids, sampled = tokenise_turns(prompt, response, finished, policy)
    if not prompt_ids or not response_ids:
        raise InputError("the prompt or the response is empty; drop the row")
    digest = hashlib.sha256(text.encode()).hexdigest()  # the same in every file
    names = {key: str(row[key]) for key in ("prompt_id", "group", "answer", "gold") if key in row}
    names.setdefault("prompt_id", f"prompt-{digest[:12]}")
    names.setdefault("group", names["prompt_id"])
    return Trajectory(
        prompt=text,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        ref_logprobs=[],
        reward=reward,
        finished=finished,
        valid=row.get("valid"),
        sampled=sampled,
        **names,
    )


def tokenise_turns(
    prompt: Any, turns: Messages, finished: bool, policy: "Policy"
) -> tuple[str, list[int], list[bool]]:
    """Text and ids of a conversation after its prompt, and which ids the policy sampled.

    These are the assistant messages, each with its end token. The last one ends the response.
    """
    from topr.policy import encode, render_prompt

    ids: list[int] = []
    sampled: list[bool] = []
    messages = list(prompt)
    start = text = render_prompt(messages, policy.tokenizer)
    for message in turns:
        before = render_prompt(messages, policy.tokenizer)
        messages.append(message)
        if message["role"] != "assistant":
            continue
        after = render_prompt(messages, policy.tokenizer, answered=True)
        if not (before.startswith(text) and after.startswith(before)):
            problem = "the chat template changes earlier turns when others follow"
            raise InputError(f"{problem}; give each answer a row with prompt and response")
        context = encode(before.removeprefix(text), policy.tokenizer, special=False)
        answer = encode(after.removeprefix(before), policy.tokenizer, special=False)
        ends = [place for place, token in enumerate(answer) if token in policy.end_tokens]
        if not ends:
            raise InputError("the chat template ends an assistant message without an end token")
        ids += context + answer
        sampled += [False] * len(context)
        sampled += [place <= ends[0] for place in range(len(answer))]
        text = after
    unused = len(answer) - ends[0] - finished  # behind the last end token, or from it on
    return text.removeprefix(start), ids[: len(ids) - unused], sampled[: len(ids) - unused]
