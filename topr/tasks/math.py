r"""Competition mathematics (MATH): the answer is in the last `\boxed{…}` of a response.

The field's usual rule: both answers are brought into a normal form, which drops units, percent and
degree signs. Equal strings are right. Otherwise math-verify decides, in the child process
`equivalence.py`, because sympy can hang, or fill the memory, on an answer of ten characters. The
child is a plain interpreter: multiprocessing would import the caller's main program, torch
included, or fork its CUDA context.
"""

import json
import re
import sys
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from subprocess import PIPE, Popen

from topr.sampling import Sampling
from topr.tasks.gsm8k import last_number
from topr.tasks.task import Grade, Task, after_thinking

SECONDS = 4  # per comparison
LONGEST = 400  # characters of an answer
EQUIVALENCE = Path(__file__).with_name("equivalence.py")
COMMAND = [sys.executable, "-P", str(EQUIVALENCE)]  # -P: our math.py would hide Python's

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:\{|(?P<bare>[\w.]+))")
# Words that change the value of an answer, unlike a unit.
CHANGES = r"\b(?:and|or|not?|more|less|than|half|dozen|hundred|thousand|\w+illion)\b"

# Each rule is an expression and its replacement. The order matters.
SPELLING = [
    # Layout: sizes, spaces, dollar and percent signs, the end of a line or sentence.
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|newline)(?![a-zA-Z])|\\!", ""),
    (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+", " "),
    (r"\\?\$|\\[()\[\]]|\\?%|(?:\\\\ ?)+$|[ .,;:]+$|(?<=\d)\.(?=/)", ""),
    # One name for each symbol and command.
    ("π", r"\\pi "),
    ("∞", r"\\infty "),
    ("−", "-"),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:math|text)(?:rm|bf|it)?(?= ?\{)|\\mbox(?= ?\{)", r"\\text"),
    # Degrees are units.
    (r"°|\^ ?\{? ?\\(?:circ|degree)(?![a-zA-Z]) ?\}?|\\degree(?![a-zA-Z])", " "),
    # Text that is not a unit.
    (rf"\\text ?\{{([^{{}}]*(?:\d|{CHANGES})[^{{}}]*)\}}", r" \1 "),
]
# A unit ends an answer: text, or a word of three letters, with a power.
UNIT = re.compile(
    r"(?<=[^\s,({]) *(?:[/ ]*(?:\\text ?\{[^{}]*\}"
    rf"|(?<![a-zA-Z\\])(?!{CHANGES})[a-zA-Z]{{3,}})(?:\^ ?\{{?\d\}}?)?)+$"
)
# Where the answer is not words.
FORMULA = [
    # Lists: "1 and 2", "1; 2", and the set {1, 2}.
    (r",? *(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\{,\}|;", ","),
    (r"^\\\{(.+)\\\}$", r"\1"),
    (r"^[a-zA-Z] *\\in(?![a-zA-Z])", ""),
    # Commands without a backslash.
    (r"(?<![a-zA-Z\\])(pi|infty|sqrt)(?![a-zA-Z])", r"\\\1 "),
    # Numbers: 4.5e33, 1/2, 1 1/2, 10 000, .5
    (r"(?<=\d)e\+?(-?\d+)", r"\\cdot10^{\1}"),
    (r"(^-?|\d )(\d+) ?/ ?(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d) (?=\d{3}(?!\d))", ""),
    (r"(?<![\d.])\.(?=\d)", "0."),
    # Braces around every argument. Unlike TeX, 2^10 is 2^{10}.
    (r"([\^_]) *(-?\d+|[a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    (r"(\\sqrt|\\frac)(?![a-zA-Z]) *(\d|[a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    (r"(\\frac *\{(?:[^{}]|\{[^{}]*\})*\}) *(\d|[a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    # A space means something after a command, as in `\pi r`, and between digits.
    (r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=\d)( ) *(?=\d)| ", r"\1\2"),
]


class MATH(Task):
    """MATH (Hendrycks et al., 2021), its selection MATH-500, and competitions. Rows hold `problem`
    and either `answer` or, as in the training split, `solution`, whose last box is the answer.
    Several answers, as in OlympiadBench, are right in any order."""

    name = instruction = "math"
    sources = [EQUIVALENCE]
    sampling = Sampling(stop=["\nQuestion:"])

    def gold(self, answer) -> str:
        text = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
        return last_box(text) or (text if len(text) <= LONGEST else "")

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last complete box means the same as the gold.

        Invalid without such a box. `valid` is None if the comparison took too long or failed. The
        canonical answer is the normal form, for a correct answer that of the gold, so that correct
        answers vote together.
        """
        right = normal_form(gold)
        answer = normal_form(last_box(after_thinking(response)) or "")
        if not answer:
            return Grade(-1.0, False, None)
        verdict = answer == right or same(right, answer)
        if verdict:
            return Grade(1.0, True, right)
        return Grade(-1.0, None if verdict is None else True, answer)

    def grade_leniently(self, response: str, gold: str) -> Grade:
        """Without a box, the answer is the last number of the response."""
        said = after_thinking(response)
        return self.grade(rf"\boxed{{{last_number(said) or ''}}} {said}", gold)


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, `\fbox{…}` or `\boxed 5`. None: no such box.

    A box of more than `LONGEST` characters does not count, which keeps the search linear."""
    for box in reversed(list(BOX.finditer(text))):
        if box["bare"]:
            return box["bare"]
        inside = text[box.end() : box.end() + LONGEST + 1]
        depth = 1
        for end, character in enumerate(inside):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return inside[:end]
    return None


def normal_form(text: str) -> str:
    r"""One spelling of an answer, `\frac{1}{2}` for `\dfrac12`, `\frac 1 2` and `1/2`, words as
    `\text{…}` in lower case. Nothing is computed: `equivalence.py` compares by mathematics."""
    for pattern, replacement in SPELLING:
        text = re.sub(pattern, replacement, text).strip()
    words = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).strip(" .()")
    if re.fullmatch("[a-zA-Z]", words):  # a choice, such as (C)
        return words
    if re.fullmatch("[a-zA-Z ']{3,}", words):
        return rf"\text{{{' '.join(words.lower().split())}}}"
    text = UNIT.sub("", text)
    for pattern, replacement in FORMULA:
        text = re.sub(pattern, replacement, text)
    if re.fullmatch(r"([a-z]=)?-?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    return text


@lru_cache(maxsize=1 << 16)
def same(gold: str, answer: str) -> bool | None:
    """Whether two answers in normal form mean the same; a child process compares them. None: the
    comparison took too long or failed.

    Raises:
        RuntimeError: the child process cannot start.
    """
    process = child()
    with suppress(BrokenPipeError):  # it has ended; the reply is then empty
        process.stdin.write(json.dumps([gold, answer, SECONDS]).encode() + b"\n")
    reply = process.stdout.readline()
    if reply:
        return json.loads(reply)
    child.cache_clear()
    # A signal, such as its alarm, makes the exit code negative.
    if process.wait() > 0:
        raise RuntimeError("math-verify cannot be imported; install requirements.txt")
    return None


@cache
def child():
    """The process that compares."""
    # in a new session, because Ctrl-C must not reach it
    return Popen(COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, start_new_session=True)
