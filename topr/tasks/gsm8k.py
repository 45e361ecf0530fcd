"""GSM8K (Cobbe et al., arXiv:2110.14168): word problems of grade school, answered by one number."""

import re
from typing import Any

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, Task, after_thinking, ask

# Sign and currency in either order, thousands in commas or none, ASCII digits. A number that goes on as another one, a
# sum, a range, a time, a date or an alternative ("18 or 20") is none: it leaves open what is meant.
NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>[-−]?)\s?[$€£]?\s?(?P<inner>[-−]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)"
    r"(?![,.\s]?\d|[½⅓⅔¼¾]|[eE][-+]?\d|\s?[-−+*/×÷^:]{1,2}\s?[$€£(]?\d|\s?[+*×÷^]\s?\w|\s?(?:or|and)\s[-−$€£]*\d)"
)
MARKUP = re.compile(  # stars mark up where they are not a product or a power
    r"\\boxed|\\text|\\mathbf|\\[$!,;()\[\] ]|[_`\"'“”‘’{}~]"
    r"|(?<![\d*])\*\*|\*\*(?![\d*])|(?<!\S)\*(?=\S)|(?<=\S)\*(?!\S)"
)
SENTENCE = re.compile(r"\n|[.!?](?:\s|$)")
CLAUSE = re.compile(r",\s|;|\(|\b(?:because|since)\b")
EXAMPLES = [
    (
        "A farmer collects 6 baskets of 14 apples each and gives 20 apples to a neighbour. How many apples are left?",
        "The farmer collects 6 * 14 = 84 apples. After giving 20 away, 84 - 20 = 64 apples are left. {} 64.",
    ),
    (
        "Nadia reads 18 pages a day. Her book has 240 pages, and 60 of them she has read already. On which day from "
        "now will she finish it?",
        "She still has to read 240 - 60 = 180 pages. At 18 pages a day that takes 180 / 18 = 10 days. {} 10.",
    ),
    (
        "A ticket costs $12, and children pay half. What do 2 adults and 3 children pay?",
        "A child pays 12 / 2 = $6. The adults pay 2 * 12 = $24 and the children 3 * 6 = $18. Together that is "
        "24 + 18 = $42. {} 42.",
    ),
    (
        "Omar has 50 stamps. Lena has 20% more than Omar, and Piet has 15 fewer than Lena. How many do the three have?",
        "Lena has 50 * 1.2 = 60 stamps. Piet has 60 - 15 = 45 stamps. The three have 50 + 60 + 45 = 155. {} 155.",
    ),
]


class GSM8K(Task):
    """Problems from `openai/gsm8k/main:test` or a file of the same rows, `{"question": …, "answer": "… #### 18"}`.

    Args:
        marker: precedes the answer, as written; a response without it is invalid (the paper's rule).

    Raises:
        InputError: the marker is empty.
    """

    name = "gsm8k"
    sampling = Sampling(temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"])
    columns = {"question": (str,), "answer": (str,)}

    def __init__(self, marker: str = "The answer is"):
        if not marker.strip():
            raise InputError("GSM8K: the marker is empty; name the words that precede an answer")
        self.marker = marker

    def problem(self, row: dict[str, Any], number: int) -> Problem:
        """The question with the number behind `####`."""
        _, marked, number_text = row["answer"].rpartition("####")
        gold = read_number(number_text) if marked else None
        if gold is None:
            raise InputError(f"GSM8K: row {number} holds no number behind '####' in its answer")
        return Problem(str(row.get("id", number)), row["question"], gold)

    def prompt(self, problem: Problem, tokenizer) -> str | list[dict[str, str]]:
        """The question for a chat template, or behind four worked examples; both ask for the marker."""
        instruction = f'Solve the problem step by step, then write "{self.marker}" followed by the number.'
        examples = [(question, answer.format(self.marker)) for question, answer in EXAMPLES]
        return ask(problem.prompt, instruction, examples, tokenizer)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the number behind the last marker equals the gold exactly; invalid without marker or number."""
        _, marker, rest = after_thinking(response).rpartition(self.marker)
        answer = read_number(rest) if marker else None
        if answer is None:
            return Grade(-1.0, False, None)
        return Grade(1.0 if answer == read_number(gold) else -1.0, True, answer)


def read_number(text: str) -> str | None:
    """The first number of the text's first sentence in plain decimal notation; of `5 + 3 = 8, …` it is 8."""
    sentence = SENTENCE.split(MARKUP.sub("", text[:400]).lstrip(" \t\n:"))[0]
    clause = next((part for part in CLAUSE.split(sentence) if re.search(r"\d", part)), "")
    for side in reversed(clause.split("=")):
        found, digit = NUMBER.search(side), re.search(r"\d", side)
        if found is not None and found.start("digits") <= digit.start() < found.end():
            whole, _, fraction = found["digits"].replace(",", "").partition(".")
            plain = (whole.lstrip("0") or "0") + f".{fraction}".rstrip("0").rstrip(".")
            return f"-{plain}" if plain != "0" and (found["sign"] or found["inner"]) else plain
    return None
