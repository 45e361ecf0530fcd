r"""Competition mathematics (MATH): the answer is in the last `\boxed{…}` of a response.

A child process compares formulas, because sympy can hang, or fill the memory, on one of ten characters. The child is a
plain interpreter: multiprocessing would import the caller's main program, torch included, or fork its CUDA context.
"""

import json
import re
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import yaml

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Prompt, Task, after_thinking, question_prompt

SECONDS = 4  # per comparison
# -P: this folder's math.py would hide Python's
COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("equivalence.py"))]


class MATH(Task):
    """MATH (Hendrycks et al., 2021) and its selection MATH-500. Rows hold `problem` and either `answer` or, as in the
    training split, `solution`, whose last box is the answer."""

    name = "math"
    sampling = Sampling(
        temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"]
    )
    optional = {"unique_id": (str, int), "answer": (str,), "solution": (str,)}
    columns = {"problem": (str,)}

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        gold = (
            row["answer"]
            if isinstance(row.get("answer"), str)
            else last_box(str(row.get("solution", "")))
        )
        if gold is None:
            raise InputError(
                rf"MATH: row {index} has neither an answer nor a solution with a \boxed{{}}; add one"
            )
        return Problem(str(row.get("unique_id", index)), row["problem"], gold)

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        return question_prompt("math", problem.prompt, tokenizer)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the last complete box means the same as the gold; invalid without a box or with over 400 characters.
        The answer is in normal form, a correct one in the gold's, so that they vote together.
        Formulas that are costly to compute are wrong; `valid` is None if the comparison failed."""
        box = last_box(after_thinking(response)) or ""
        right, right_units = normal_form(gold)
        answer, units = normal_form(
            box if len(box) <= 400 else "", by_letter=right in tuple("ABCDEF")
        )
        if not answer:
            return Grade(-1.0, False, None)
        if units and right_units and units != right_units:
            return Grade(
                -1.0, True, f"{answer} {' '.join(sorted(units))}"
            )  # no vote for the bare number
        radians = r"\frac{(%s)\cdot\pi}{180}"
        one = radians % right if "degree^1" in right_units and r"\pi" in answer else right
        other = radians % answer if "degree^1" in units and r"\pi" in right else answer
        try:
            same = answer == right or (
                not tables().costly.search(answer) and judge.same(one, other)
            )
        except TimeoutError:
            return Grade(-1.0, None, answer)
        return Grade(1.0, True, right) if same else Grade(-1.0, True, answer)


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, `\fbox{…}` or `\boxed 5` that is not empty; None: no such box. Boxes
    joined by commas and a last "and" are one list."""
    last, end, joined, answer, opened = -1, 0, "", None, []
    for found in re.finditer(
        r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:(\{)|([-+]?[\w.,/]+))?|\\.|[{}]", text, re.DOTALL
    ):
        start, content = found, found[2] or ""
        if found[0] == "{" or found[1]:
            opened.append(found)
        elif found[0] == "}" and opened:
            start = opened.pop()
            content = text[start.end() : found.start()] if start[1] and start.start() > last else ""
        if content.strip():
            joint = re.sub(r"\\text|[\s$*~{}()\[\]\\]", "", text[end : start.start()])
            joined = f"{joined}, {content}" if joined and joint in (",", "and", ",and") else content
            answer = joined if joint.endswith("and") else content
            last, end = start.start(), found.end()
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
                self.child = Popen(
                    COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, start_new_session=True
                )
            with suppress(BrokenPipeError):  # if the child has ended; the reply is then empty
                self.child.stdin.write(json.dumps([gold, answer, SECONDS]).encode() + b"\n")
            reply = self.child.stdout.readline()
            if (
                not reply and self.child.wait() > 0
            ):  # a signal, such as that of its alarm, would make this negative
                raise RuntimeError(
                    "the process that compares answers cannot start; is math-verify installed?"
                )
        if reply in (b"", b"null\n"):
            raise TimeoutError
        return json.loads(reply)


judge = Judge()


@cache  # at first use, because every command imports this file
def tables() -> SimpleNamespace:
    """The tables of `latex.yaml`, their patterns compiled."""
    found = SimpleNamespace(
        **yaml.safe_load(Path(__file__).with_name("latex.yaml").read_text("utf-8"))
    )
    for rule in found.spelling + found.formulas:
        pattern, new = rule
        rule[:] = (
            re.compile(pattern),
            new if isinstance(new, str) else lambda m, new=new: new.get(m[1], m[0]),
        )
    found.characters, found.units = (
        str.maketrans(found.characters),
        [kind.split() for kind in found.units],
    )
    found.kinds = {name: kind[0] for kind in found.units for name in kind}
    names = "|".join(name for name in found.kinds if name.isalpha() and len(name) > 1)
    for name in ("unit", "measure", "says_more", "costly"):
        setattr(found, name, re.compile("".join(getattr(found, name)).replace("NAMES", names)))
    return found


def normal_form(text: str, by_letter: bool = True) -> tuple[str, frozenset[str]]:
    r"""One spelling of an answer, `\frac{1}{2}` for `\dfrac12`, `\frac 1 2` and `1/2`, words as `\text{…}` in lower
    case, and the units dropped from it, such as `s^-1`. Of a choice with its value, `(B) 5`, the letter or the value.
    Nothing is computed: `equivalence.py` compares by mathematics."""
    known = tables()
    text = text.translate(known.characters)
    for pattern, spelling in known.spelling:
        text = pattern.sub(spelling, text)
    words = re.sub(r"\\text *\{([^{}]*)\}", r" \1 ", text).strip(" .")
    words = re.sub(r"^(?:(?:an?|the|on|in|The|[Cc]hoice|[Oo]ption) +)+(?=[(a-zA-Z])", "", words)
    long = words != text or re.search("[a-zA-Z]{4}", words)
    if words.lower() in known.numbers:
        return known.numbers[words.lower()], frozenset()
    if choice := re.fullmatch(
        r"\(? *([a-zA-Z]) *[).:]*|\(?([A-F])[):]+\.? +(?!.*\b[A-F][):]|[+*/=^,]|- )(.+)", words
    ):
        return (
            (choice[1] or choice[2], frozenset())
            if by_letter or choice[1]
            else normal_form(choice[3])
        )
    if re.fullmatch(r"[A-Z](?:(?: *,| +and| +or)+ +[A-Z])+", words):  # several choices
        text = words
    elif long and re.fullmatch(r"(?!infinity)[a-zA-Z][a-zA-Z '.-]*", words):
        return rf"\text{{{' '.join(words.lower().split())}}}", frozenset()
    dropped: list[str] = []

    def drop(match: re.Match) -> str:
        if known.says_more.search(match[0]):
            return match[0]
        dropped.append(match[0])
        return ""

    if not re.search(
        r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text
    ):  # sin 30 is not the sine of 30 degrees
        text = re.sub(r"\^\{\\circ\} *(?:[CF](?![a-zA-Z]))?", drop, text)
    text = known.unit.sub(drop, text).strip(" ,")
    for pattern, spelling in known.formulas:
        text = pattern.sub(spelling, text)
    if not re.search(r"[(\[]|\\\{", text):  # in (1,234) the comma separates coordinates
        text = re.sub(
            r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text
        )
    text = re.sub(r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=\d)( ) *(?=\d)| ", r"\1\2", text)
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    units = known.measure.findall(" ".join(dropped).lower() + "%" * ("%" in text))
    return text, frozenset(
        f"{known.kinds[u]}^{'-' * bool(per)}{known.powers.get(b or a, a)}" for per, b, u, a in units
    )
