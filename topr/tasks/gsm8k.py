"""GSM8K (Cobbe et al., arXiv:2110.14168): grade-school word problems, answered by one number."""

import re
from dataclasses import dataclass
from decimal import Decimal

from topr.sampling import Sampling
from topr.tasks.task import Grade, Task, after_thinking, exact_grade

# A sign (none in "18-20"), a dollar sign, thousands with or without commas, a decimal part.
# ASCII digits only: `\d` also matches other scripts.
NUMBER = re.compile(r"(?:(?<!\w)[-−])?(?:\$[-−]?)?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)")
SENTENCE_END = re.compile(r"\n|[.!?](?![0-9])")


@dataclass(eq=False)
class GSM8K(Task):
    """Problems from `openai/gsm8k/main:test`, or from a file of rows
    `{"question": …, "answer": "… #### 18"}`; without `####` the answer holds one number, as in
    "9 (apples)"."""

    marker: str = "The answer is"  # the paper's: a response without it is invalid
    skip_unanswered: bool = False  # leave out problems whose answer is not one number
    name = instruction = "gsm8k"
    sampling = Sampling(stop=["\nQuestion:"])

    def gold(self, answer) -> str:
        answer = str(answer).rpartition("####")[2]
        return last_number(answer) or "" if len(NUMBER.findall(answer)) == 1 else ""

    def grade(self, response: str, gold: str) -> Grade:
        """The answer is the last number of the first sentence after the last marker, as in
        "The answer is 9 + 9 = $18." Without a marker or a number the response is invalid."""
        _, marker, rest = after_thinking(response).rpartition(self.marker)
        sentence = SENTENCE_END.split(rest.lstrip(" \n:*$"))[0]
        return exact_grade(last_number(sentence) if marker else None, gold)

    def grade_leniently(self, response: str, gold: str) -> Grade:
        """The answer is the last number of the response."""
        return exact_grade(last_number(after_thinking(response)), gold)


def last_number(text: str) -> str | None:
    """The last number in plain decimal notation: `1234.5` for `$1,234.50`, rounded to 28
    digits. None: no number."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    number = Decimal(re.sub("[$,]", "", numbers[-1]).replace("−", "-"))
    return f"{number.normalize() + 0:f}"
