"""Import of users' files: recognise the format, tokenise, score log mu."""

from typing import TYPE_CHECKING, Any, Literal

from jsonargparse.typing import PositiveInt

from topr.io import LARGEST, InputError
from topr.trajectories.file import Trajectory, write_trajectories
from topr.trajectories.rows import Row, Types, load_rows

if TYPE_CHECKING:
    from topr.policy import Policy

Precision = Literal["32-true", "bf16-mixed"]
Messages = list[dict[str, Any]]
NAMES = {  # what other formats call the keys of the plain one
    "messages": "response",
    "completion": "response",  # TRL: huggingface.co/docs/trl/dataset_formats
    "label": "reward",
    "input": "prompt",  # verl, trainer.rollout_data_dir; OpenRLHF, batch_inference --eval_task rm
    "output": "response",
    "score": "reward",
    "gts": "gold",
}
OPTIONAL: Types = {
    "prompt_id": (str, int),
    "group": (str, int),
    "finished": (bool,),
    "gold": (str, int, float),
}


def import_files(
    files: list[str],
    policy: str,
    out: str,
    microbatch_tokens: PositiveInt = 16384,
    precision: Precision = "32-true",
) -> None:
    """Write the rows of files as trajectories, with log mu of a policy.

    A text prompt gets special tokens, chat messages the tokenizer's template. A finished response,
    which is the default, gets an end token unless it has one. Boolean rewards become +-1.

    Args:
        files: sources that `load_rows` takes
        policy: folder or hub name of the policy that sampled the responses
        out: trajectory file to write
        microbatch_tokens: tokens of one forward
        precision: of the forward that scores; best that of the training to come

    Raises:
        InputError: for a bad row, or if no row is left.
    """
    import torch

    from topr.identity import provenance
    from topr.policy import load_policy, own_device, vocabulary_and_context
    from topr.policy.model import empty_policy
    from topr.trajectories.scoring import add_log_probs

    empty = empty_policy(policy)  # to check every row before the weights are loaded
    trajectories: list[Trajectory] = []
    for file in files:
        for number, row in enumerate(load_rows(file, {}, OPTIONAL), start=1):
            try:
                trajectories += [tokenise(plain, empty) for plain in plain_rows(row)]
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
    print(f"{len(kept)} trajectories; left out as too long: {len(trajectories) - len(kept)}")


def plain_rows(row: Row) -> list[Row]:
    """A row in the plain format, or two rows of a pair."""
    row = {key: value for key, value in row.items() if value is not None}  # Parquet adds nulls
    renamed = {name: row[key] for key, name in NAMES.items() if key in row}
    row = renamed | row
    if {"chosen", "rejected"} <= row.keys():
        pair = []
        for key, reward in (("chosen", True), ("rejected", False)):
            prompt, response = row.get("prompt"), row[key]
            if isinstance(response, list) and not isinstance(prompt, list):
                prompt, response = response[:-1], response[-1:]  # only the last answer was judged
            pair.append(row | {"prompt": prompt, "response": response, "reward": reward})
        return pair
    if not {"response", "reward"} <= row.keys():
        raise InputError(f"found the keys {', '.join(row)}; expected prompt, response and reward")
    return [row]


def read_reward(value: Any) -> float:
    """A number as it is; true is +1 and false -1."""
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        expected = f"true, false or a number up to {LARGEST:.0f}"
        raise InputError(f"the reward is {value!r:.20}, expected {expected}")
    return 2.0 * value - 1.0 if isinstance(value, bool) else float(value)


def read_messages(value: Any) -> Messages:
    """Chat messages without the nulls that Parquet adds; an InputError if they are none."""
    messages = []
    for message in value if isinstance(value, list) and value else [value]:
        if not isinstance(message, dict) or "role" not in message:
            raise InputError(f"found {message!r:.60}, expected chat messages with role and content")
        messages.append({key: part for key, part in message.items() if part is not None})
    return messages


def split(prompt: Any, response: Any) -> tuple[Any, Any]:
    """Prompt and response: text, or messages from the first answer of the assistant on. A prompt
    beside a whole conversation repeats its question."""
    if isinstance(response, str):
        return prompt if isinstance(prompt, str) else read_messages(prompt), response
    messages = read_messages(response)
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise InputError("messages must end in an answer of the assistant")
    start = roles.index("assistant")
    question = messages[:start] or read_messages(prompt)
    turns = messages[start:]
    if len(turns) == 1 and "tool_calls" not in turns[0]:
        return question, turns[0].get("content", "")
    return question, turns


def tokenise(row: Row, policy: "Policy") -> Trajectory:
    """The trajectory of a plain row, without log mu."""
    from topr.identity import content_hash
    from topr.policy import encode, encode_prompt

    finished = row.get("finished", True)
    prompt, response = split(row.get("prompt"), row["response"])
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
    prompt_id = str(row.get("prompt_id", content_hash(text)))
    return Trajectory(
        prompt_id=prompt_id,
        group=str(row.get("group", prompt_id)),
        prompt=text,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        ref_logprobs=[],
        reward=read_reward(row["reward"]),
        finished=finished,
        gold=str(row["gold"]) if "gold" in row else None,
        sampled=sampled,
    )


def tokenise_turns(
    prompt: Messages, turns: Messages, finished: bool, policy: "Policy"
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
        context = encode(before.removeprefix(text), policy.tokenizer, special=False)
        answer = encode(after.removeprefix(before), policy.tokenizer, special=False)
        ends = [place for place, token in enumerate(answer) if token in policy.end_tokens]
        if not (before.startswith(text) and after.startswith(before) and ends):
            problem = "the chat template changes earlier turns, or ends one without an end token"
            raise InputError(f"{problem}; give each answer a row with prompt and response")
        ids += context + answer
        sampled += [False] * len(context)
        sampled += [place <= ends[0] for place in range(len(answer))]
        text = after
    unused = len(answer) - ends[0] - finished  # behind the last end token, or from it on
    return text.removeprefix(start), ids[: len(ids) - unused], sampled[: len(ids) - unused]
