r"""Whether two answers in normal form mean the same: math-verify decides, after structural checks.

math-verify alone takes `(1,2)` for `\{1,2\}`, `5,5` for `5`, `2516_9` for `2516_8`, `2x=18` for 18,
and numbers that differ after the sixth decimal for equal. So lists and brackets are taken apart
here, and math-verify sees single formulas only. This file runs in a process of its own, without
the rest of topr.
"""

import json
import logging
import re
import resource
import signal
import sys
from contextlib import suppress

MEMORY = 1 << 30  # bytes of address space; math-verify itself takes a quarter
# The left side of `x=5`, `x_1=5`, `f(2)=5` and `(x,y)=(1,2)`, but not of `2x=5`.
NAME = re.compile(r"(?:^|(?<=,))(?:\\?[a-zA-Z]+(?:_\{\w+\})?(?:\([\w,]*\))?|\(\w,[\w,]+\))=")


def same(gold: str, answer: str) -> bool:
    """Whether an answer means the same as the gold, both as `math.normal_form` writes them."""
    from math_verify import LatexExtractionConfig, parse, verify

    if "=" not in answer:
        gold = NAME.sub("", gold)
    if "=" not in gold:
        answer = NAME.sub("", answer)
    if gold == answer:
        return True
    # Words, numbers with a base, times of day and ratios are right only as equal strings.
    if re.search(r"\\text|\d_|:", gold + answer):
        return False
    if shape(gold) != shape(answer):
        return False
    parsed = []
    for text in (gold, answer):
        # math-verify takes i for a variable
        text = re.sub(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", r"(\\sqrt{-1})", text)
        # no extraction of bare numbers: it would read the 5 in any formula that it cannot parse
        parsed.append(
            parse(
                f"${text}$",
                [LatexExtractionConfig()],
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
        )
    return verify(*parsed, float_rounding=12, numeric_precision=30, timeout_seconds=None)


def shape(text: str) -> tuple[bool, int, str]:
    """Whether it is an equation, its commas and, if there are any, the brackets around it."""
    commas = text.count(",")
    brackets = re.sub(r"[^()\[\]]", "", text[0] + text[-1]) if commas else ""
    return "=" in text, commas, brackets


def main():
    """Answer lines `[gold, answer, seconds]` by `true`, `false`, or `null` for an error."""
    with suppress(ValueError):  # macOS bounds no address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()
    same("1", "2")  # imports before the first clock starts
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.alarm(seconds)  # the kernel ends this process, even in the middle of C code
        try:
            verdict = same(gold, answer)
        except Exception:
            verdict = None
        signal.alarm(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
