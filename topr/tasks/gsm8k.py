"""GSM8K (Cobbe et al., arXiv:2110.14168): grade-school word problems, answered by one number."""

import re
from dataclasses import dataclass
from typing import Any

from jsonargparse.typing import NotEmptyStr

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Prompt, Task, after_thinking, exact_grade, question_prompt

# Sign and currency in either order, thousands with or without commas, ASCII digits only. Not part of another number, a
# sum, a range, a time, a date or an alternative ("18 or 20"): those leave open which number is meant.
NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>[-−]?)\s?[$€£]?\s?(?P<inner>[-−]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)"
    r"(?![,.\s]?\d|[½⅓⅔¼¾]|[eE][-+]?\d|\s?[-−+*/×÷^:]{1,2}\s?[$€£(]?\d|\s?[+*×÷^]\s?\w|\s?(?:or|and)\s[-−$€£]*\d)"
)
MARKUP = re.compile(  # including asterisks, except in a product or a power
    r"\\boxed|\\text|\\mathbf|\\[$!,;()\[\] ]|[_`\"'“”‘’{}~]"
    r"|(?<![\d*])\*\*|\*\*(?![\d*])|(?<!\S)\*(?=\S)|(?<=\S)\*(?!\S)"
)


@dataclass(eq=False)
class GSM8K(Task):
    """Problems from `openai/gsm8k/main:test` or a file of the same rows, `{"question": …, "answer": "… #### 18"}`."""

    marker: NotEmptyStr = "The answer is"  # a response without this text is invalid (the paper's rule)
    name = "gsm8k"
    sampling = Sampling(temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"])
    columns = {"question": (str,), "answer": (str,)}

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        _, marked, number_text = row["answer"].rpartition("####")
        gold = read_number(number_text) if marked else None
        if gold is None:
            raise InputError(f"GSM8K: row {index} holds no number after '####' in its answer; add one")
        return Problem(str(row.get("id", index)), row["question"], gold)

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        return question_prompt("gsm8k", problem.prompt, tokenizer, self.marker)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the number after the last marker equals the gold exactly; invalid without marker or number."""
        _, marker, rest = after_thinking(response).rpartition(self.marker)
        return exact_grade(read_number(rest) if marker else None, str(read_number(gold)))


def read_number(text: str) -> str | None:
    """The first number of the first sentence, in plain decimal notation; the 8 of `5 + 3 = 8, …`; None: no number."""
    sentence = re.split(r"\n|[.!?](?:\s|$)", MARKUP.sub("", text[:400]).lstrip(" \t\n:"))[0]
    clauses = re.split(r",\s|;|\(|\b(?:because|since)\b", sentence)
    clause = next((clause for clause in clauses if re.search(r"\d", clause)), "")
    for side in reversed(clause.split("=")):
        found, digit = NUMBER.search(side), re.search(r"\d", side)
        if found and digit and found.start("digits") <= digit.start() < found.end():
            whole, _, fraction = found["digits"].replace(",", "").partition(".")
            plain = (whole.lstrip("0") or "0") + f".{fraction}".rstrip("0").rstrip(".")
            return f"-{plain}" if plain != "0" and (found["sign"] or found["inner"]) else plain
    return None
