"""Import of users' files: recognise the format, tokenise, score log mu."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError
from jsonargparse.typing import PositiveInt

from topr.io import LARGEST, InputError, check_absent, explained, first_line
from topr.trajectories.fields import FIELDS, Expressions, find_fields, normalise_messages
from topr.trajectories.file import Trajectory, write_trajectories
from topr.trajectories.rows import load_rows

if TYPE_CHECKING:
    from topr.policy import Policy

Messages = list[dict]
# what a row of unexpected types makes the code below raise
UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)


def import_files(
    files: list[str],
    policy: str,
    out: str,
    threshold: float | None = None,
    scale: tuple[float, float] | None = None,
    log_mu: Literal["rescored", "stored"] = "rescored",
    microbatch_tokens: PositiveInt = 16384,
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
    overwrite: bool = False,
    **fields: str,
):
    """Write the rows of files as trajectories, with log mu of a policy.

    A text prompt gets special tokens, chat messages the tokenizer's template. A finished response,
    which is the default, gets an end token unless it has one: EOS, or what the template writes.
    Token ids stay as they were sampled. Boolean rewards become +-1.

    Args:
        files: sources that `load_rows` takes
        policy: folder or hub name of the policy that sampled the responses
        out: trajectory file to write
        threshold: rewards from here on become +1, others -1
        scale: the rewards that become -1 and +1, others in proportion; a threshold goes before it
        log_mu: what to write for stored log-probs of token ids: them, or this policy's log mu
        microbatch_tokens: tokens of one forward
        precision: of the forward that scores; best that of the training to come
        overwrite: replace the file that is there
        fields: where rows hold a field, instead of `FIELDS`

    Raises:
        InputError: for a bad row, or if no row is left.
    """
    import torch

    from topr.policy import load_policy, own_device, vocabulary_and_context
    from topr.run.identity import provenance
    from topr.trajectories.scoring import add_log_probs

    check_absent(out, overwrite)
    with explained("a field must be named by a path or a Jinja expression"):
        readers = {n: Expressions().compile_expression(e) for n, e in (FIELDS | fields).items()}
    with own_device():
        model = load_policy(policy)
    limit = min(microbatch_tokens, vocabulary_and_context(policy)[1])
    trajectories = []
    for file in files:
        for number, row in enumerate(load_rows(file, {}), start=1):
            try:
                for found in find_fields(row, readers):
                    found["reward"] = as_number(found["reward"], threshold, scale)
                    trajectories.append(tokenise(model, **found))
            except UNFIT as error:
                raise InputError(
                    f"{file}, row {number} cannot be imported ({first_line(error)}): {row!s:.120}",
                    "--prompt, --response, --reward or a --config name others: data/README.md",
                ) from error
    kept = [t for t in trajectories if len(t.prompt_ids) + len(t.response_ids) <= limit]
    if not kept:
        raise InputError(f"no row fits into {limit} tokens, --microbatch_tokens or the context")
    if log_mu == "stored" and not all(t.ref_logprobs for t in kept):
        raise InputError("--log_mu stored needs log-probs of all token ids; --logprobs names them")
    rescored = [replace(t) for t in kept]
    with torch.autocast(model.device.type, torch.bfloat16, precision == "bf16-mixed"):
        gaps = add_log_probs(model, rescored, microbatch_tokens)
    if gaps:
        token = np.abs(np.concatenate(gaps))
        sequence = np.abs([gap.sum() for gap in gaps])
        print(
            f"|stored - rescored| log mu: {token.mean():.3g} a token, {sequence.mean():.3g} a "
            "sequence; an engine rounds by about 0.003 a token, another policy differs by more"
        )
    metadata = provenance(policy, precision)
    if log_mu == "stored":
        metadata["policy"] = None  # another forward computed log mu, so no ratio need start at 1
        rescored = kept
    write_trajectories(out, rescored, metadata)
    print(
        f"{len(kept)} trajectories; left out as too long: {len(trajectories) - len(kept)}\n"
        f"reward: threshold {threshold}, scale {scale}: "
        f"{sum(t.reward > 0 for t in kept)} of {len(kept)} above 0"
    )


def as_number(reward, threshold: float | None, scale: tuple[float, float] | None) -> float:
    """A reward by a threshold or a scale, else as it is; a boolean is +-1. A ValueError if it is
    NaN or infinite."""
    value = float(reward)
    if not np.isfinite(value):
        raise ValueError("the reward is NaN or infinite")
    if threshold is not None:
        return 1.0 if value >= threshold else -1.0
    low, high = scale or ((0, 1) if isinstance(reward, bool) else (-1, 1))
    return 2 * (value - low) / (high - low) - 1


def tokenise(
    policy: "Policy", prompt, response, reward: float, gold, finished, logprobs
) -> Trajectory:
    """The trajectory of found fields; log mu is what was stored, if anything."""
    from topr.policy import encode, encode_prompt, render_prompt
    from topr.run.identity import content_hash

    finished = finished not in (False, "length")
    sampled = None
    if isinstance(response, list) and isinstance(response[0], int):
        prompt_ids, response_ids = prompt, response
        if max(prompt_ids + response_ids) >= len(policy.tokenizer):
            raise InputError("a token id is not in the vocabulary of --policy")
        # of a certain token an engine's log-prob can round to above 0
        if len(logprobs or response_ids) != len(response_ids) or not all(
            -LARGEST <= value <= 0.01 for value in logprobs or []
        ):
            raise InputError(
                "log-probs must be finite numbers up to 0, one for each token id of the response",
                "--logprobs none leaves them out",
            )
        text, response = policy.tokenizer.batch_decode([prompt_ids, response_ids])
        finished = response_ids[-1] in policy.end_tokens
    else:
        logprobs = None  # of unknown tokens
        prompt, response = split(normalise_messages(prompt), normalise_messages(response))
        text, prompt_ids = encode_prompt(prompt, policy.tokenizer)
        if isinstance(response, str):
            response_ids = encode(response, policy.tokenizer, special=False)
            if finished and not policy.end_tokens & set(response_ids[-1:]):
                end = policy.tokenizer.eos_token_id
                if text is not prompt:  # chat messages: the end that their template writes
                    turns = [*prompt, {"role": "assistant", "content": "x"}]
                    answered = render_prompt(turns, policy.tokenizer, answered=True)
                    ids = encode(answered, policy.tokenizer, special=False)
                    end = max(policy.end_tokens & {*ids[-3:]}, default=end)
                response_ids.append(end)
        else:
            ids, marks = tokenise_conversation([*prompt, *response], finished, policy)
            response_ids = ids[len(prompt_ids) :]
            sampled = marks[len(prompt_ids) :]
            response = policy.tokenizer.decode(response_ids)
    if not prompt_ids or not response_ids:
        raise InputError("the prompt or the response is empty; drop the row")
    prompt_id = content_hash(text)
    return Trajectory(
        prompt_id=prompt_id,
        group=prompt_id,
        prompt=text,
        prompt_ids=prompt_ids,
        response=response,
        response_ids=response_ids,
        ref_logprobs=[min(value, 0.0) for value in logprobs or []],
        reward=reward,
        finished=finished,
        gold=None if gold is None else str(gold),
        sampled=sampled,
    )


def split(prompt, response: str | Messages) -> tuple[Any, str | Messages]:
    """Of a conversation the messages before the first answer, and the others; if these are one
    answer, its text. A prompt beside a whole conversation repeats its question."""
    if isinstance(response, str):
        if prompt is None:
            raise InputError("no prompt was found")
        return prompt, response
    start = [message["role"] for message in response].index("assistant")
    prompt = response[:start] or prompt
    answers = response[start:]
    if len(answers) == 1 and "tool_calls" not in answers[0]:
        return prompt, answers[0]["content"]
    return prompt, answers


def tokenise_conversation(
    messages: Messages, finished: bool, policy: "Policy"
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation up to its last answer, and which of them the policy sampled.

    These are the assistant messages, each with its end token.
    """
    from topr.policy import encode, encode_prompt, render_prompt

    text = render_prompt(messages, policy.tokenizer, answered=True)
    ids = encode(text, policy.tokenizer, special=False)
    is_end = np.isin(ids, list(policy.end_tokens))
    sampled = np.zeros(len(ids), dtype=bool)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            _, context = encode_prompt(messages[:place], policy.tokenizer)
            answered = render_prompt(messages[: place + 1], policy.tokenizer, answered=True)
            start = len(context)
            kept = ids[:start] == context and text.startswith(answered)
            if not kept or not is_end[start:].any():
                raise InputError(
                    "the chat template changes earlier turns or writes no end token; split the row"
                )
            end = start + is_end[start:].argmax() + 1
            sampled[start:end] = True
    if not finished:
        end -= 1  # the template has added an end token
    return ids[:end], sampled[:end].tolist()
