r"""Whether two answers in normal form mean the same: math-verify decides, after checks of what it overlooks.

math-verify alone takes `(1,2)` for `\{1,2\}`, `5,5` for `5`, `2516_9` for `2516_8`, `2x=18` for 18, and numbers that
differ after the sixth decimal for equal. This file runs in a process of its own, without the rest of topr.
"""

import json
import logging
import re
import resource
import signal
import sys
from contextlib import suppress
from itertools import accumulate

MEMORY = 1 << 30  # bytes of address space; math-verify itself takes a quarter
CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\begin": r"\end"}
# x, x_1, f'(x), f^{-1}(x), (x,y), but not x(x-3)
NAME = r"(?:(\\?[a-zA-Z]+)(?:_\{[^{}]*\}|\^\{-1\})?'?(?:\((?!\1\b)[^()]*\))?|\(\\?[a-zA-Z]+(?:,\\?[a-zA-Z]+)+\))"
ORDER = r"<|>|\\(?:le|ge|ne)(?![a-zA-Z]) ?"
LETTER = r"\\[a-zA-Z]+|[a-zA-Z](?:_\{[^{}]*\}|\([^()]*\))?"
CONSTANT = r"\\(?:frac|sqrt|cdot|log|ln|pi|circ|[lr](?:floor|ceil|vert))(?![a-zA-Z])|(?<![a-zA-Z\\])[ei](?![a-zA-Z])"
# signs of sets and matrices, which equal others that are written without the same brackets
SETS = re.compile(rf"{ORDER}|\\(?:pm|cup|cap|setminus|backslash|mathbb|begin)(?![a-zA-Z])")


def same(gold: str, answer: str) -> bool:
    """Whether an answer means the same as the gold, both as `math.normal_form` writes them."""
    if gold == answer:
        return True
    (kind, golds), (answer_kind, answers) = _parts(gold), _parts(answer)
    if kind != answer_kind:
        coordinates = {kind, answer_kind} == {
            "()",
            "list",
        } and "=" in gold + answer  # (3,4) and x=3, y=4
        return bool(coordinates or SETS.search(gold + answer)) and _same_formula(gold, answer)
    if kind == "atom":
        return _same_atom(*golds, *answers)
    if kind in ("list", "union"):  # in any order
        for part in golds:
            found = next((other for other in answers if same(part, other)), None)
            if found is None:
                return False
            answers.remove(found)
        return not answers
    return len(golds) == len(answers) and all(map(same, golds, answers))


def _parts(text: str) -> tuple[str, list[str]]:
    """The kind of an answer (list, union, its pair of brackets, or atom) and its parts."""
    if r"\pm" in text:
        return "atom", [text]
    value = re.sub(rf"^{NAME}(?:=|\\in ?)", "", text)
    tokens, depths = _tokens(value)
    enclosed = len(tokens) > 1 and depths[-1] == 0 and 0 not in depths[:-1]
    if enclosed or r"\in" in text[: -len(value)]:  # not y=(x+1)(x-1)
        text = value
    if len(parts := _split(text, r"\cup")) > 1:
        return "union", parts
    if len(parts := _split(text, ",", ";", r"\or", r"\\")) > 1:
        return "union" if r"\or" in text and SETS.search(text) else "list", parts
    if enclosed and tokens[0] in ("(", "[", "{", r"\{"):
        inside = "".join(tokens[1:-1])
        parts = _split(inside, ",", ";")
        if len(parts) == 1 and tokens[0] != "[":
            return _parts(inside)
        return "list" if tokens[0] == r"\{" else tokens[0] + tokens[-1], parts
    return "atom", [text]


def _tokens(text: str) -> tuple[list[str], list[int]]:
    """Commands and characters, and how many brackets are open after each; those of (0,1] and [0,1) match."""
    tokens = re.findall(r"\\[a-zA-Z]+|\\.|.", text)
    return tokens, list(
        accumulate((token in CLOSING) - (token in CLOSING.values()) for token in tokens)
    )


def _split(text: str, *separators: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts = [""]
    for token, depth in zip(*_tokens(text), strict=True):
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _same_atom(gold: str, answer: str) -> bool:
    both = gold + answer
    if "=" not in answer:
        gold = re.sub(rf"^{NAME}=(?!.*=)", "", gold)
    elif "=" not in gold:  # 2+3=5, x=5, and x+y=5 are 5; but not 4+2=5, x-3=5, 2x+y=5, x+y=0
        left, *_, value = answer.split("=")
        letters = set(re.findall(LETTER, re.sub(CONSTANT, "", left)))
        asked = (
            len(letters) > 1
            and value != "0"
            and not re.search(r"\d[a-zA-Z(\\]|(?<!\{)[-+]\d", left)
        )
        return bool(
            re.fullmatch(NAME, left) or asked or (not letters and same(gold, left))
        ) and same(gold, value)
    if r"\text" in both or re.search(r"\d:[0-5]\d(?!\d)", gold):  # words, or a time of day
        words = [
            re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace(" ", "").lower()
            for text in (gold, answer)
        ]
        return words[0].strip(".()").removesuffix("s") == words[1].strip(".()").removesuffix("s")
    if re.search(r"\d_\{", both):
        (digits, _, base), (other, _, other_base) = gold.partition("_"), answer.partition("_")
        return digits == other and other_base in (base or "{10}", "")  # the question names the base
    if "%" in both:
        value, given = gold.replace("%", ""), answer.replace("%", "")
        hundredth = [
            rf"\frac{{{v}}}{{100}}" if "%" in t else v for t, v in ((gold, value), (answer, given))
        ]
        return same(value, given) or (("%" in gold) != ("%" in answer) and same(*hundredth))
    return _same_formula(gold, answer)


def _same_formula(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    if _unsolved(answer) and not _unsolved(gold):
        return False
    parsed = []
    for text in (gold, answer):
        text = re.sub(r"(\d+)\.(\d*)(?:\\overline\{(\d+)\})?", _fraction, text)
        text = re.sub(r"(\d+)\^\{\\circ\}", r"(\1\\cdot\\frac{\\pi}{180})", text)
        text = re.sub(
            r"(?<![a-zA-Z\\])i(?![a-zA-Z])", r"(\\sqrt{-1})", text
        )  # math-verify takes i for a variable
        # no extraction of bare numbers: it would read the 5 in any formula that it cannot parse
        parsed.append(
            parse(
                f"${text}$",
                [LatexExtractionConfig()],
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
        )
    return verify(
        *parsed,
        float_rounding=12,
        numeric_precision=30,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _unsolved(text: str) -> bool:
    """Whether it is an inequality other than `x<5` and `1<x<5`."""
    variable = r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])|\\(?!infty|pi|frac|sqrt|cdot)[a-z]+"
    sides = re.split(ORDER, text)
    named = [side for side in sides if re.search(variable, side)]
    return len(sides) > 1 and not (len(named) == 1 and re.fullmatch(variable, named[0].strip()))


def _fraction(decimal: re.Match) -> str:
    r"""`1.25` as `\frac{125}{100}` and `1.\overline{3}` as `\frac{12}{9}`: floats are compared after rounding."""
    whole, digits, period = decimal.groups(default="")
    numerator = int(whole + digits + period) - (int(whole + digits) if period else 0)
    return rf"\frac{{{numerator}}}{{{'9' * len(period) or 1}{'0' * len(digits)}}}"


def main() -> None:
    """Answer lines `[gold, answer, seconds]` by `true`, `false`, or `null` for an error."""
    with suppress(ValueError):  # macOS bounds no address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # the default action, which the caller may have changed: the kernel ends this process, even in the middle of C code
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable()
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    _same_formula("1", "2")  # imports before the first clock starts
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.alarm(seconds)
        try:
            verdict = bool(same(gold, answer))
        except Exception:
            verdict = None
        signal.alarm(0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
