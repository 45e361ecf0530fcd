r"""Competition mathematics (MATH): the answer stands in the last `\boxed{…}` of a response."""

import re
from itertools import accumulate
from typing import Any

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks import judge
from topr.tasks.latex import read
from topr.tasks.task import Grade, Problem, Task, after_thinking, ask

LONGEST = 400  # characters of an answer; the longest of MATH has about 160
LONGEST_RESPONSE = 100_000  # characters of its end that are searched for a box
DEEPEST = 20  # nested brackets of an answer
REFUSED = [
    r"\*\*|__",
    r"\d{4}[%)}\]]*!|![%)}\]]*!",  # factorials of large numbers and of factorials
    r"\^\{-?\d{5}|\\binom\{\d{5}",
    r"\^\{[^{}]*\^\{[^{}]*\^|\d[)}\]]*\^\{\d+\^\{(?:[6-9]|\d\d)",  # towers of powers: 2^{2^5} passes, 9^{9^9} does not
]
INSTRUCTION = r"Solve the problem step by step, then give the final answer in \boxed{}."
EXAMPLES = [
    (
        r"A bakery packs $84$ rolls into bags of $6$ and sells a bag for $\$2.50$. How many dollars does it take in?",
        r"There are $84 \div 6 = 14$ bags. They bring $14 \cdot 2.50 = 35$ dollars. The answer is $\boxed{35}$.",
    ),
    (
        r"Find all real $x$ with $x^2 - x \le 12$. Give the answer in interval notation.",
        r"The inequality says $x^2 - x - 12 \le 0$, that is $(x-4)(x+3) \le 0$. A product of two factors is at most "
        r"zero where their signs differ or one of them vanishes, so $-3 \le x \le 4$. The answer is $\boxed{[-3,4]}$.",
    ),
    (
        r"Two fair dice are rolled. What is the probability that the larger of the two numbers is exactly $4$?",
        r"Both numbers are at most $4$ in $16$ of the $36$ outcomes, and at most $3$ in $9$ of them. The larger one is "
        r"exactly $4$ in the other $16 - 9 = 7$ outcomes. The answer is $\boxed{\frac{7}{36}}$.",
    ),
    (
        r"In triangle $PQR$ the angle at $Q$ is right, $PQ = 2$ and $QR = 6$. How long is the altitude from $Q$?",
        r"The hypotenuse is $PR = \sqrt{2^2 + 6^2} = 2\sqrt{10}$ and the area is $\frac12 \cdot 2 \cdot 6 = 6$. The "
        r"altitude $h$ satisfies $\frac12 \cdot 2\sqrt{10} \cdot h = 6$, so $h = \frac{6}{\sqrt{10}} = "
        r"\frac{3\sqrt{10}}{5}$. The answer is $\boxed{\frac{3\sqrt{10}}{5}}$.",
    ),
]


class MATH(Task):
    r"""MATH (Hendrycks et al., 2021) and its selection MATH-500.

    Rows hold `problem` and either `answer` or, as in the training split, `solution`, whose last box is the answer.
    """

    name = "math"
    sampling = Sampling(temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"])
    optional = {"unique_id": (str, int), "answer": (str,), "solution": (str,)}
    columns = {"problem": (str,)}

    def problem(self, row: dict[str, Any], number: int) -> Problem:
        r"""A problem from a row; its id is `unique_id`, or else the row's number from 0.

        Raises:
            InputError: the row has no answer and no box in its solution.
        """
        gold = row["answer"] if isinstance(row.get("answer"), str) else last_box(str(row.get("solution", "")))
        if gold is None:
            raise InputError(rf"MATH: row {number} has neither an answer nor a solution with a \boxed{{}}")
        return Problem(str(row.get("unique_id", number)), row["problem"], gold)

    def prompt(self, problem: Problem, tokenizer) -> str | list[dict[str, str]]:
        return ask(problem.prompt, INSTRUCTION, EXAMPLES, tokenizer)

    def grade(self, response: str, gold: str) -> Grade:
        r"""+1 if the last complete box holds what the gold means; invalid without a box, or with one of over 400 signs.

        The answer is its normal form (see `latex.py`), the gold's where they mean the same. What could take long to
        compute counts as wrong (see `refused`).
        """
        box = last_box(after_thinking(response)[-LONGEST_RESPONSE:])
        answer, units = read(box) if box is not None and len(box) <= LONGEST else ("", frozenset())
        if not answer:
            return Grade(-1.0, False, None)
        right, right_units = read(gold)
        if units and right_units and not units & right_units:
            return Grade(-1.0, True, f"{answer} {' '.join(sorted(units))}")  # votes for no bare number
        compared = [
            rf"\frac{{({text})\cdot\pi}}{{180}}" if "degree" in own and r"\pi" in other else text
            for text, own, other in ((right, right_units, answer), (answer, units, right))
        ]
        if answer == right:
            return Grade(1.0, True, right)
        if refused(answer):
            return Grade(-1.0, True, answer)
        same = judge.same(*compared)
        # every right answer is one and the same to a vote
        return Grade(1.0 if same else -1.0, None if same is None else True, right if same else answer)


def last_box(text: str) -> str | None:
    r"""What the last complete `\boxed{…}`, `\fbox{…}` or `\boxed 5` holds; empty ones do not count. None: no box."""
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


def refused(text: str) -> bool:
    """Whether a normal form could take long to compute, or is written as no answer of MATH is."""
    return (
        any(sign.isnumeric() and not sign.isascii() for sign in text)
        or max(accumulate((sign in "({[") - (sign in ")}]") for sign in text)) > DEEPEST
        or any(re.search(pattern, text) for pattern in REFUSED)
    )
