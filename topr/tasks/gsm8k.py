"""GSM8K (Cobbe et al., arXiv:2110.14168): grade-school word problems, answered by one number."""

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

from jsonargparse.typing import NotEmptyStr

from topr.io import InputError
from topr.sampling import Sampling
from topr.tasks.task import (
    Grade,
    Problem,
    Prompt,
    Task,
    after_thinking,
    exact_grade,
    question_prompt,
)

# Sign, currency, thousands with or without commas, ASCII digits only, scale. Not part of a word, sum or mixed number.
NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>[-−]|(?i:negative|minus)\s)?\s?[$€£₹¥]?\s?(?P<inner>[-−])?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)"
    r"(?:\s?(?P<scale>(?i:dozen|hundred|thousand|million|billion)|[kKM])\b(?!&))?(?![½⅓⅔¼¾]|\s?[+*×÷^]\s?(?:\w|$))"
)
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "k": 1000,
    "million": 10**6,
    "m": 10**6,
    "billion": 10**9,
}
EXACT = Context(prec=500)  # more digits than an answer has
# What, beside the number #, leaves open which one is meant: a second number ("18 to 20", "4 hours and 30 minutes"), a
# negation, a bound, a part, an operation, an alternative
OPEN = re.compile(
    r"(?i)(?<![a-z]\^)\d|[<>≤≥≠±]|\\(?:[gln]e|pm|times|cdot|div)|(?:\b(?:not|never|neither|nor|cannot)|n['’]t)\b.*#"
    r"|\b(?:than|over|under|above|below|half|thirds?|quarters?|twice|double|triple|and)(?: of| the)*\s*#|\bor\b"
    r"|#\s?(?:hal(?:f|ves)|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths|squared|cubed|plus|minus)\b"
    r"|\b(?:of|by|x)\s*$|\b(?:dozen|(?:hundred|thousand|\w*illion)s?|below zero)\b|#(?: \w+)? (?:and|&|point|times)"
    r" (?:an?|half|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty)\b"
)
MARKUP = re.compile(  # including asterisks, except in a product or a power, and quotes, except in 6'2 and isn't
    r"\\(?:boxed|fbox|text|math)(?:bf|rm|it)?|\\(?:begin|end)\{\w+\*?\}|\\[$!,;()\[\] ]|\$\$|[_`\"“”{}~]|\b[Rr]s\."
    r"|&(?==)|\bapprox\.|(?<!\w)['‘’]|['‘’](?!\w)|(?<![\d*])\*{2,3}|\*{2,3}(?![\d*])|(?<!\S)\*(?=\S)|(?<=\S)\*(?!\S)"
)
ASIDE = re.compile(r"(?<=[\w%])\s\((?!or\b)[^()]*\)")
REASON = re.compile(  # or, at the end, "for 3 days", "to read 120 pages"
    r"(\d.*?)(?:,?\s\(?(?:because|since)\b.*|,\s(?:so|as|leaving|with|not)\b[^=]*$"
    r"|(?:\s(?:for|after)|(?<=[a-z])\s(?:in|to\s[a-z]+))\s(?:the\s|all\s)*[$]?\d+(?:\s[a-z]+)?$)"
)


@dataclass(eq=False)
class GSM8K(Task):
    """Problems from `openai/gsm8k/main:test` or a file of the same rows, `{"question": …, "answer": "… #### 18"}`."""

    marker: NotEmptyStr = (
        "The answer is"  # a response without this text is invalid (the paper's rule)
    )
    name = "gsm8k"
    sampling = Sampling(
        temperature=1.0, top_k=500, top_p=1.0, max_new_tokens=512, stop=["\nQuestion:"]
    )
    columns = {"question": (str,), "answer": (str,)}

    def problem(self, row: dict[str, Any], index: int) -> Problem:
        _, marked, number_text = row["answer"].rpartition("####")
        gold = read_number(number_text) if marked else None
        if gold is None:
            raise InputError(
                f"GSM8K: row {index} holds no number after '####' in its answer; add one"
            )
        return Problem(str(row.get("id", index)), row["question"], gold)

    def prompt(self, problem: Problem, tokenizer: Any) -> Prompt:
        return question_prompt("gsm8k", problem.prompt, tokenizer, self.marker)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the number after the last marker equals the gold exactly; invalid without marker or one number."""
        _, marker, rest = after_thinking(response).rpartition(self.marker)
        return exact_grade(read_number(rest) if marker else None, str(read_number(gold)))


def read_number(text: str) -> str | None:
    """The one number of the first sentence, in plain decimal notation; the 8 of `5 + 3 = 8`; None: none or several."""
    text = re.sub(
        r"\s*(?:=|\b(?:is|equals)\b)\s*", " = ", MARKUP.sub("", text[:400]).lstrip(" \t\n:")
    )
    sentence = REASON.sub(r"\1", ASIDE.sub("", re.split(r"\n|[.!?](?:\s|$)", text)[0]))
    for clause in re.split(r"\bwhich\s(?:=|makes|gives|means)(?!.*=)", sentence):
        several = re.search(r"=[^=\d]*\d[^=]*?(?:[,;]\s|\band\b)[^=]*=", clause)  # x = 5, y = 8
        for side in [] if several else reversed(clause.split("=")):
            found = NUMBER.search(side)
            if found and not OPEN.search(f"{side[: found.start()]}#{side[found.end() :]}"):
                scale = SCALES.get((found["scale"] or "").lower(), 1) * (
                    -1 if found["sign"] or found["inner"] else 1
                )
                value = EXACT.normalize(
                    EXACT.multiply(Decimal(found["digits"].replace(",", "")), scale)
                )
                return f"{value:f}" if value else "0"
    return None
