r"""Competition mathematics (MATH): the answer is in the last `\boxed{…}` of a response.

The field's usual rule: answers are brought into a normal form, which drops units, the percent and
the degree sign. Equal strings are right; otherwise math-verify decides, in a child process
(`equivalence.py`) that can be killed, because sympy can hang, or fill the memory, on ten characters.
The child is a plain interpreter: multiprocessing would import the caller's main program, torch
included, or fork its CUDA context.
"""

import json
import re
import sys
import threading
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Prompt, Task, after_thinking, question_prompt

SECONDS = 4  # per comparison
LONGEST = 400  # characters of an answer
# -P: this folder's math.py would hide Python's
COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("equivalence.py"))]

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<open>\{)|(?P<bare>[\w.]+))|\\.|[{}]", re.DOTALL)

CHARACTERS = str.maketrans(
    {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "−": "-", "·": r"\cdot ", "×": r"\cdot "}
)
# Words that change the value of an answer, unlike a unit.
CHANGES_VALUE = (
    r"\b(?:and|or|not?|more|less|than|half|halves|dozen|hundred|thousand|\w+illion|squared|cubed)\b"
)
# An expression and its replacement, in the order in which they are applied.
SPELLING = [
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|newline)(?![a-zA-Z])|\\!", ""),
    (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+", " "),
    (r"\\?\$|\\[()\[\]]|\\?%|(?:\\\\ ?)+$|[ .,;:]+$", ""),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\times(?![a-zA-Z])", r"\\cdot"),
    (r"\^ ?\{? ?\\(?:circ|degree)(?![a-zA-Z]) ?\}?|\\degree(?![a-zA-Z])", " "),
    (r"\\(?:math|text)(?:rm|bf|it|tt)?(?= ?\{)|\\mbox(?= ?\{)", r"\\text"),
    (rf"\\text ?\{{([^{{}}]*(?:\d|{CHANGES_VALUE})[^{{}}]*)\}}", r" \1 "),
]
# Where the answer is not words: a unit is text, or a word of three letters, at the end.
UNIT = re.compile(
    rf"(?<=[^\s,({{]) *(?:[/ ]*(?:\\text ?\{{[^{{}}]*\}}|(?<![a-zA-Z\\])(?!{CHANGES_VALUE})[a-zA-Z]{{3,}})"
    r"(?:\^ ?\{?\d\}?)?)+$"
)
FORMULA = [
    (r",? *(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
    (r"(?<![a-zA-Z\\])(pi|infty|sqrt)(?![a-zA-Z])", r"\\\1 "),
    (r"^[a-zA-Z] *\\in(?![a-zA-Z])", ""),
    (r"\{,\}|;", ","),
    (r"^\\\{(.+)\\\}$", r"\1"),
    (r"(\\sqrt|\^)\(([^()]*)\)", r"\1{\2}"),
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
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Not compared: Python's operators, digits of other scripts, and what takes long to compute: large
# factorials and factorials of factorials, large powers, towers such as 9^{9^9} (but not 2^{2^5}).
COSTLY = re.compile(
    r"\*\*|__|(?![0-9])\d"
    r"|\d{4}[)}\]]*!|![)}\]]*!|\^\{-?\d{5}|\\binom\{\d{5}"
    r"|\^\{[^{}]*\^\{[^{}]*\^|\d[)}\]]*\^\{\d+\^\{(?:[6-9]|\d\d)"
)


class MATH(Task):
    """MATH (Hendrycks et al., 2021) and its selection MATH-500. Rows hold `problem` and either
    `answer` or, as in the training split, `solution`, whose last box is the answer."""

    name = "math"
    sampling = Sampling(stop=["\nQuestion:"])
    columns = {"problem": (str,)}
    optional = {"unique_id": (str, int), "answer": (str,), "solution": (str,)}

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        gold = row.get("answer") or last_box(row.get("solution") or "")
        if gold is None:
            raise ValueError(
                rf"row {index} has neither an answer nor a solution with a \boxed{{}}; add one"
            )
        return Problem(str(row.get("unique_id", index)), row["problem"], gold)

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        return question_prompt("math", problem.prompt, tokenizer)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last complete box means the same as the gold.

        Invalid without a box or with more than 400 characters in it. Answers that are costly to
        compute are wrong. `valid` is None if the comparison took too long or failed. The canonical
        answer is the normal form, for a correct answer that of the gold, so that they vote together.
        """
        box = last_box(after_thinking(response))
        if not box or len(box) > LONGEST:
            return Grade(-1.0, False, None)
        answer = normal_form(box)
        right = normal_form(gold)
        try:
            correct = answer == right or (not COSTLY.search(answer) and judge.same(right, answer))
        except TimeoutError:
            return Grade(-1.0, None, answer)
        return Grade(1.0, True, right) if correct else Grade(-1.0, True, answer)


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, `\fbox{…}` or `\boxed 5`. None: no such box."""
    last = None
    content = None
    opened = []
    for token in BOX.finditer(text):
        if token["bare"]:
            last, content = token, token["bare"]
        elif token["open"] or token[0] == "{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start["open"] and (last is None or start.start() > last.start()):
                last, content = start, text[start.end() : token.start()]
    return content


def normal_form(text: str) -> str:
    r"""One spelling of an answer, `\frac{1}{2}` for `\dfrac12`, `\frac 1 2` and `1/2`, words as
    `\text{…}` in lower case. Nothing is computed: `equivalence.py` compares by mathematics."""
    text = text.translate(CHARACTERS)
    for pattern, replacement in SPELLING:
        text = re.sub(pattern, replacement, text).strip()
    words = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).strip(" .()")
    if re.fullmatch(r"[a-zA-Z]", words):
        return words  # a choice, such as (C)
    if re.fullmatch(r"[a-zA-Z][a-zA-Z ']*", words) and (words != text or len(words) > 3):
        return rf"\text{{{' '.join(words.lower().split())}}}"
    text = UNIT.sub("", text)
    for pattern, replacement in FORMULA:
        text = re.sub(pattern, replacement, text)
    if not re.search(r"[(\[{]", text):  # in (1,234) the comma separates coordinates
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return text


class Judge:
    """Compares answers in a child process, which it starts when needed."""

    def __init__(self) -> None:
        self.child: Popen | None = None
        self.lock = threading.Lock()  # threads must not read each other's replies

    @lru_cache(maxsize=1 << 16)  # noqa: B019 (there is one judge)
    def same(self, gold: str, answer: str) -> bool:
        """Whether two answers in normal form mean the same.

        Raises:
            TimeoutError: the comparison took too long or failed.
        """
        with self.lock:
            reply = self._ask(json.dumps([gold, answer, SECONDS]))
        if reply in ("", "null\n"):
            raise TimeoutError
        return json.loads(reply)

    def _ask(self, question: str) -> str:
        """The child's reply, empty if it ended."""
        if self.child is None or self.child.poll() is not None:
            # in a new session, because Ctrl-C must not reach the child
            self.child = Popen(COMMAND, stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)
        try:
            print(question, file=self.child.stdin, flush=True)
        except BrokenPipeError:
            return ""
        reply = self.child.stdout.readline()
        if not reply and self.child.wait() > 0:  # a signal, such as its alarm, makes it negative
            raise RuntimeError("math-verify cannot be imported; install requirements.txt")
        return reply


judge = Judge()
