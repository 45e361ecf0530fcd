r"""Competition mathematics (MATH): the answer is in the last `\boxed{…}` of a response.

A child process compares formulas, because sympy can hang, or fill the memory, on one of ten characters. The child is a
plain interpreter: multiprocessing would import the caller's main program, torch included, or fork its CUDA context.
"""

import json
import re
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks.latex import read, tables
from topr.tasks.task import Grade, Problem, Prompt, Task, after_thinking, question_prompt

SECONDS = 4  # per comparison
# -P: this folder's math.py would hide Python's
COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("equivalence.py"))]


class MATH(Task):
    """MATH (Hendrycks et al., 2021) and its selection MATH-500. Rows hold `problem` and either `answer` or, as in the
    training split, `solution`, whose last box is the answer."""

    name = "math"
    sampling = Sampling(temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"])
    optional = {"unique_id": (str, int), "answer": (str,), "solution": (str,)}
    columns = {"problem": (str,)}

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        gold = row["answer"] if isinstance(row.get("answer"), str) else last_box(str(row.get("solution", "")))
        if gold is None:
            raise InputError(rf"MATH: row {index} has neither an answer nor a solution with a \boxed{{}}; add one")
        return Problem(str(row.get("unique_id", index)), row["problem"], gold)

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        return question_prompt("math", problem.prompt, tokenizer)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last complete box means the same as the gold; invalid without a box or with over 400 characters.
        The answer is in normal form (see `latex.py`), a correct one in the gold's, so that they vote together.
        Formulas that are costly to compute are wrong; `valid` is None if the comparison failed."""
        box = last_box(after_thinking(response)) or ""
        (answer, units), (right, right_units) = read(box if len(box) <= 400 else ""), read(gold)
        if not answer:
            return Grade(-1.0, False, None)
        if units and right_units and not units & right_units:
            return Grade(-1.0, True, f"{answer} {' '.join(sorted(units))}")  # no vote for the bare number
        radians = r"\frac{(%s)\cdot\pi}{180}"
        one = radians % right if "degree" in right_units and r"\pi" in answer else right
        other = radians % answer if "degree" in units and r"\pi" in right else answer
        try:
            same = answer == right or (not tables().costly.search(answer) and judge.same(one, other))
        except TimeoutError:
            return Grade(-1.0, None, answer)
        return Grade(1.0, True, right) if same else Grade(-1.0, True, answer)


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, `\fbox{…}` or `\boxed 5` that is not empty; None: no such box."""
    last, answer, opened = -1, None, []
    for found in re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:(\{)|([-+]?[\w.,/]+))?|\\.|[{}]", text, re.DOTALL):
        if found[2]:
            last, answer = found.start(), found[2]
        elif found[0] == "{" or found[1]:
            opened.append(found)
        elif found[0] == "}" and opened:
            start = opened.pop()
            content = text[start.end() : found.start()] if start[1] and start.start() > last else ""
            if content.strip():
                last, answer = start.start(), content
    return answer


class Judge:
    """Compares answers in a child process, which it starts when needed."""

    child: Any = None
    lock = threading.Lock()  # threads must not read each other's replies

    @lru_cache(maxsize=1 << 16)  # noqa: B019 (there is one judge)
    def same(self, gold: str, answer: str) -> bool:
        """Whether two answers in normal form mean the same; a TimeoutError if the comparison took long or failed."""
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                # in a new session, because Ctrl-C must not reach the child
                self.child = Popen(COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, start_new_session=True)
            with suppress(BrokenPipeError):  # if the child has ended; the reply is then empty
                self.child.stdin.write(json.dumps([gold, answer, SECONDS]).encode() + b"\n")
            reply = self.child.stdout.readline()
            if not reply and self.child.wait() > 0:  # a signal, such as that of its alarm, would make this negative
                raise RuntimeError("the process that compares answers cannot start; is math-verify installed?")
        if reply in (b"", b"null\n"):
            raise TimeoutError
        return json.loads(reply)


judge = Judge()
