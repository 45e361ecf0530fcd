"""Import of users' files: recognise the format, tokenise, score log mu."""

import hashlib
import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jsonargparse.typing import PositiveInt

from topr.io import LARGEST, InputError
from topr.trajectories.file import Trajectory, write_trajectories
from topr.trajectories.rows import Row, Types, load_rows

if TYPE_CHECKING:
    from topr.policy import Policy

Precision = Literal["32-true", "bf16-mixed"]
Messages = list[dict[str, Any]]


class Format(NamedTuple):
    """The keys of a format's rows; of a pair, `response` is the better and `reward` the worse."""

    prompt: str  # "": the response begins with the prompt
    response: str
    reward: str


FORMATS = (  # the first one whose keys a row has
    Format("prompt", "response", "reward"),
    Format("", "messages", "reward"),
    Format("prompt", "completion", "label"),  # huggingface.co/docs/trl/dataset_formats
    Format("prompt", "chosen", "rejected"),
    Format("", "chosen", "rejected"),
    Format("input", "output", "score"),  # verl, trainer.rollout_data_dir
    Format("input", "output", "reward"),  # OpenRLHF, batch_inference --eval_task rm
)
OPTIONAL: Types = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "valid": (bool,),
    "answer": (str, int, float),
    "gold": (str, int, float),
}
ROLES = ("system", "developer", "user", "assistant", "tool")


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
    """The trajectories of a row, without log mu: two of a pair, else one."""
    row = {key: value for key, value in row.items() if value is not None}
    form = recognise(row)
    if form.response == "output":
        warnings.warn("dumps do not mark responses that were cut off", stacklevel=2)
    if "gts" in row:  # verl's name
        row["gold"] = row.pop("gts")
    unused = row.keys() - {*form, *OPTIONAL}
    if unused:
        warnings.warn(f"unknown keys are ignored: {', '.join(sorted(unused))}", stacklevel=2)

    prompt = row.get(form.prompt)
    response = row[form.response]
    last = row[form.reward]
    if form.response == "messages":
        prompt, response = split_conversation(response)
        return [tokenise(row, prompt, response, read_reward(last, "reward"), policy)]
    if form.reward != "rejected":
        prompt, response = split_answer(prompt, response, form.response)
        return [tokenise(row, prompt, response, read_reward(last, form.reward), policy)]
    if prompt is None and isinstance(response, str) and isinstance(last, str):
        prompt, response, last = split_dialogues(response, last)
    chosen = tokenise(row, *split_answer(prompt, response, "chosen"), 1.0, policy)
    rejected = tokenise(row, *split_answer(prompt, last, "rejected"), -1.0, policy)
    if chosen.prompt != rejected.prompt:
        raise InputError("chosen and rejected must differ in their last message alone")
    return [chosen, rejected]


def recognise(row: Row) -> Format:
    """The first format whose keys a row has."""
    for form in FORMATS:
        if set(form) - {""} <= row.keys():
            return form
    formats = "; ".join(" ".join(form).strip() for form in FORMATS)
    raise InputError(f"found the keys {', '.join(row)}; expected those of one: {formats}")


def read_reward(value: Any, key: str) -> float:
    """A number as it is; true is +1 and false -1."""
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    if key != "label" and isinstance(value, int | float) and abs(value) <= LARGEST:
        return float(value)
    expected = "a boolean" if key == "label" else f"a boolean or a number up to {LARGEST:.0f}"
    raise InputError(f"key {key!r} holds {value!r:.20}, expected {expected}")


def split_answer(prompt: Any, response: Any, key: str) -> tuple[str | Messages, str]:
    """Prompt and response, of a response in text or one message, perhaps after the whole prompt."""
    if prompt is None or not isinstance(response, str):
        *before, answer = check_messages(response, key)
        response = answer.get("content")
        if answer["role"] != "assistant" or not isinstance(response, str):
            raise InputError(f"key {key!r} must end in an assistant message with text")
        if before and isinstance(prompt, list):
            raise InputError(f"key {key!r} must be one message beside the messages of a prompt")
        prompt = before or prompt  # a text beside messages repeats their question
    if not isinstance(prompt, str) and check_messages(prompt, "prompt")[-1]["role"] == "assistant":
        raise InputError("the prompt must not end in an assistant message")
    return prompt, response


def split_conversation(conversation: Any) -> tuple[Messages, str | Messages]:
    """Prompt and response of a conversation; all messages of the assistant were sampled."""
    messages = check_messages(conversation, "messages")
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise InputError("key 'messages' must end in an assistant message")
    first = roles.index("assistant")
    prompt = check_messages(messages[:first], "messages")
    response = messages[first:]
    is_text = len(response) == 1 and not response[0].get("tool_calls")
    return prompt, response[0]["content"] if is_text else response


def split_dialogues(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt and responses of two dialogues in text.

    The prompt is their common beginning, cut as `extract_prompt` of TRL does (trl/data_utils.py):
    without a space at its end, and a character shorter if one dialogue continues the other.
    """
    end = len(os.path.commonprefix([chosen, rejected]))
    if end == min(len(chosen), len(rejected)) or chosen[end - 1] == " ":
        end -= 1
    if end < 1:
        raise InputError("chosen and rejected have no common beginning; give the key prompt")
    return chosen[:end], chosen[end:], rejected[end:]


def check_messages(value: Any, key: str) -> Messages:
    """The value, if it is chat messages that templates understand; otherwise an InputError."""
    messages: list[Any] = value if isinstance(value, list) and value else [None]
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            expected = f"chat messages with content and a role of {', '.join(ROLES)}"
            raise InputError(f"key {key!r} holds {value!r:.60}, expected {expected}")
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
    else:
        response, response_ids, sampled = tokenise_turns(prompt, response, finished, policy)
    if not prompt_ids or not (response_ids or finished):
        raise InputError("the prompt or the response is empty; drop the row")
    if finished and not policy.end_tokens & set(response_ids[-1:]):
        response_ids.append(policy.tokenizer.eos_token_id)
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
    between: list[int] = []  # ids since the last one that was sampled
    messages = list(prompt)
    start = text = render_prompt(messages, policy.tokenizer)
    for message in turns:
        messages.append(message)
        if message["role"] != "assistant":
            continue
        before = render_prompt(messages[:-1], policy.tokenizer)
        after = render_prompt(messages, policy.tokenizer, answered=True)
        if not (before.startswith(text) and after.startswith(before)):
            problem = "the chat template changes earlier turns when others follow"
            raise InputError(f"{problem}; give each answer a row with prompt and response")
        between += encode(before[len(text) :], policy.tokenizer, special=False)
        answer = encode(after[len(before) :], policy.tokenizer, special=False)
        ends = [place for place, token in enumerate(answer, 1) if token in policy.end_tokens]
        if not ends:
            raise InputError("the chat template ends an assistant message without an end token")
        ids += between + answer[: ends[0]]
        sampled += [False] * len(between) + [True] * ends[0]
        between = answer[ends[0] :]
        text = after
    if not finished:  # without the last end token
        ids.pop()
        sampled.pop()
    return text[len(start) :], ids, sampled
