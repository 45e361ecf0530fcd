"""Import of users' files into the trajectory format."""

import hashlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from topr.io import LARGEST, InputError
from topr.trajectories.file import Trajectory, Types, add_log_probs, load_rows, write_trajectories

FORMATS = [  # keys of the prompt (absent where the responses start with it), response, reward
    ("prompt", "response", "reward"),
    ("messages", "reward"),
    ("prompt", "completion", "label"),  # huggingface.co/docs/trl/dataset_formats
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("input", "output", "reward"),  # OpenRLHF, openrlhf/cli/batch_inference.py, --eval_task rm
    ("input", "output", "score"),  # verl, verl/trainer/ppo/ray_trainer.py, _dump_generations
]
OPTIONAL: Types = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "valid": (bool,),
}
OPTIONAL |= dict.fromkeys(("answer", "gold"), (str, int, float))
ROLES = ("system", "developer", "user", "assistant", "tool")
DUMP = "dumps of OpenRLHF and verl do not mark responses that were cut off, and verl's prompts lack special tokens"
Precision = Literal["32-true", "bf16-mixed"]


def import_files(
    files: list[str],
    policy: str,
    out: str,
    microbatch_tokens: PositiveInt = 16384,
    precision: Precision = "32-true",
) -> tuple[int, int]:
    """Tokenise files in one of `FORMATS` and score log mu; returns how many responses were left out as too long, and
    how many pairs because their responses are equal. A text prompt gets special tokens, chat messages the tokenizer's
    template, a finished response (the default) an end token unless it has one. Boolean rewards become +-1. Raises
    InputError for a bad row, or if none is left.

    Args:
        policy: folder or hub name of the policy that sampled the responses
        out: trajectory file to write
        microbatch_tokens: tokens of one forward
        precision: of the forward that scores; best that of the training to come
    """
    import torch

    from topr.policy import load_policy, own_device, provenance, vocabulary_and_context
    from topr.policy.model import empty_policy

    empty, (vocabulary, context) = empty_policy(policy), vocabulary_and_context(policy)
    trajectories: list[Trajectory] = []
    equal = 0
    for file in files:
        for number, row in enumerate(load_rows(file, {}, OPTIONAL), start=1):
            try:
                found = _trajectories(row, empty.tokenizer, vocabulary, empty.end_tokens)
            except InputError as error:
                raise InputError(f"{file}, row {number}: {error}") from error
            if len(found) == 2 and found[0].response_ids == found[1].response_ids:
                equal += 1
            else:
                trajectories += found
    limit = min(microbatch_tokens, context)
    kept = [t for t in trajectories if len(t.prompt_ids) + len(t.response_ids) <= limit]
    if not kept:
        message = f"no row fits into {limit} tokens (--microbatch-tokens, or the policy's context)"
        raise InputError(
            f"{', '.join(files)}: {message}; left out as pairs of equal responses: {equal:,}"
        )
    unknown = {empty.tokenizer.unk_token_id} - {None, *empty.end_tokens}  # GPT-2's is its end token
    tokens = [token for t in kept for token in t.response_ids]
    if (share := sum(token in unknown for token in tokens) / len(tokens)) > 0.01:
        message = f"{share:.1%} of the response tokens are unknown to the tokenizer"
        warnings.warn(
            f"{message}; --policy must be the policy that sampled the responses", stacklevel=2
        )
    with own_device():
        model = load_policy(policy)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        add_log_probs(model, kept, microbatch_tokens)
    write_trajectories(
        out, kept, provenance(policy, precision, sampling={"unknown_tokens": sorted(unknown)})
    )
    return len(trajectories) - len(kept), equal


def _trajectories(
    row: dict[str, Any], tokenizer: Any, vocabulary: int, ends: set[int]
) -> list[Trajectory]:
    from topr.policy import encode, encode_prompt

    row = {key: value for key, value in row.items() if value is not None}
    if {
        "input",
        "output",
        "score",
    } <= row.keys():  # verl; validation dumps hold a `reward` beside the score
        row["gold"] = row.pop("gts", row.get("gold"))
        row.pop("reward", None)
    graded: dict[str, Any] = {"valid": row.get("valid")}
    graded |= {
        name: str(row[name])
        for name in ("answer", "gold")
        if isinstance(row.get(name), OPTIONAL[name])
    }
    trajectories = []
    for prompt, response, reward in _exchanges(row):
        text, prompt_ids = encode_prompt(prompt, tokenizer)
        graded["sampled"], finished = None, row.get("finished", True)
        if isinstance(response, str):
            response_ids = encode(response, tokenizer, special=False)
            while ends & set(response_ids[:-1]) and not tokenizer.decode(response_ids[-1]).strip():
                response_ids.pop()  # the line break that a template writes after a turn, which was not sampled
        else:
            response, response_ids, graded["sampled"] = _turns(
                prompt, response, tokenizer, ends, finished
            )
        if not prompt_ids or not (response_ids or finished):
            raise InputError(f"the {'response' if prompt_ids else 'prompt'} is empty; drop the row")
        if max(prompt_ids + response_ids) >= vocabulary:
            raise InputError(
                f"the tokenizer gives ids beyond the model's vocabulary of {vocabulary}; use its own"
            )
        if finished and not ends & set(response_ids[-1:]):
            response_ids.append(tokenizer.eos_token_id)
        # a hash of the text: a prompt has the same id in every file
        prompt_id = str(
            row.get("prompt_id", f"prompt-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
        )
        names = prompt_id, str(row.get("group", prompt_id)), text
        trajectories.append(
            Trajectory(*names, prompt_ids, response, response_ids, [], reward, finished, **graded)
        )
    if trajectories[0].prompt != trajectories[-1].prompt:
        raise InputError("chosen and rejected must differ in their last message alone")
    return trajectories


def _turns(
    prompt: Any, answers: list[dict[str, Any]], tokenizer: Any, ends: set[int], finished: bool
) -> tuple[str, list[int], list[bool]]:
    """What follows the prompt of a conversation, up to the last token that the policy sampled: text, token ids, and
    which of them it sampled, namely every assistant message with its end token. Each piece is tokenised for itself."""
    from topr.policy import encode, render_prompt

    ids, sampled, messages = list[int](), list[bool](), list(prompt)
    text = start = render_prompt(prompt, tokenizer)
    for message in answers:
        messages.append(message)
        if message["role"] == "assistant":
            before, after = (
                render_prompt(messages[:-1], tokenizer),
                render_prompt(messages, tokenizer, answered=True),
            )
            if not (before.startswith(text) and after.startswith(before)):
                reason = "the chat template writes earlier turns anew when others follow"
                raise InputError(
                    f"{reason}; give each assistant message a row of its own, with prompt and response"
                )
            between, turn = (
                encode(t, tokenizer, special=False)
                for t in (before[len(text) :], after[len(before) :])
            )
            end = next((i for i, token in enumerate(turn, 1) if token in ends), None)
            if end is None:
                raise InputError(
                    "the chat template ends an assistant message without an end token; use another"
                )
            ids += between + turn
            sampled += [False] * len(between) + [True] * end + [False] * (len(turn) - end)
            text = after
    length = len(sampled) - sampled[::-1].index(True) - (not finished)
    return text[len(start) :], ids[:length], sampled[:length]


def _exchanges(row: dict[str, Any]) -> Iterator[tuple[str | list[dict], str | list[dict], float]]:
    """Each prompt, as text or messages, with a response and its reward; true is +1 and false -1. The response to the
    first message of a conversation is the messages that follow it, from the first of the assistant's to the last."""
    if "prompt" not in row and all(isinstance(row.get(key), str) for key in ("chosen", "rejected")):
        row = row | _split_dialogues(row["chosen"], row["rejected"])
    fits = [form for form in FORMATS if set(form) <= row.keys()]
    form = max(fits, key=len, default=())
    if not form or any(set(other) - set(form) for other in fits):
        found = f"the keys with a value ({', '.join(sorted(row)[:9]) or 'none'}) fit {len(fits) or 'no'} formats"
        raise InputError(f"{found}; expected those of one: {'; '.join(map(', '.join, FORMATS))}")
    if form[0] == "input":
        warnings.warn(DUMP, stacklevel=4)
    if unused := sorted(row.keys() - {*form, *OPTIONAL}):
        warnings.warn(f"keys without a meaning are ignored: {', '.join(unused)}", stacklevel=4)
    *prompt_key, key, last = form
    if last == "rejected":
        rewards = {key: 1.0, last: -1.0}
    elif isinstance(row[last], bool):
        rewards = {key: 1.0 if row[last] else -1.0}
    elif last != "label" and isinstance(row[last], int | float) and abs(row[last]) <= LARGEST:
        rewards = {key: float(row[last])}
    else:
        expected = "a boolean" if last == "label" else f"a boolean or a number up to {LARGEST:.0f}"
        raise InputError(f"key {last!r} holds {row[last]!r:.20}, expected {expected}")
    for key, reward in rewards.items():
        prompt, response = row[prompt_key[0]] if prompt_key else None, row[key]
        if prompt is None or not isinstance(response, str):
            *before, answer = messages = _messages(response, key)
            roles, text = [message["role"] for message in messages], answer.get("content")
            if (
                key == "messages"
                and roles[-1] == "assistant"
                and ("assistant" in roles[:-1] or text is None)
            ):
                first = roles.index("assistant")
                yield _messages(messages[:first], "prompt"), messages[first:], reward
                continue
            if prompt is None or prompt in [
                message.get("content") for message in before
            ]:  # it repeats the question
                prompt, before = before, []
            if before or roles[-1] != "assistant" or text is None:
                raise InputError(
                    f"key {key!r} must end in an assistant message, the only one beside a prompt"
                )
            response = text
        if not isinstance(prompt, str):
            prompt = _messages(prompt, "prompt")
            if prompt[-1]["role"] == "assistant":
                raise InputError(
                    "the prompt ends in an assistant message; the response must answer another role"
                )
        yield prompt, response, reward


def _split_dialogues(chosen: str, rejected: str) -> dict[str, str]:
    """Prompt and responses of two dialogues. The prompt is their common prefix, cut as `extract_prompt` of TRL
    (trl/data_utils.py) does: without a space at its end; if one dialogue continues the other, without the last
    character, so that no response is empty."""
    end = len(os.path.commonprefix([chosen, rejected]))
    end -= end == min(len(chosen), len(rejected)) or chosen[end - 1] == " "
    if end < 1:
        raise InputError(
            "chosen and rejected have no common beginning to be the prompt; give the key prompt"
        )
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    """Chat messages; apply_chat_template ignores the null keys that Parquet adds."""
    messages = [value] if isinstance(value, dict) else value
    for message in messages if isinstance(messages, list) and messages else [value]:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            expected = f"chat messages with content and a role of {', '.join(ROLES)}, or text beside a prompt"
            raise InputError(f"key {key!r} holds {message!r:.60}, expected {expected}")
    return messages
