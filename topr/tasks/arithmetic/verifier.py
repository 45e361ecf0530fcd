"""The generative verifier of the embedded task: `1` or `0` for every step of a solution, then `#` and the verdict.

Prompt `9+3*2-4>9+3=12;12*2=25;25-4=21;#21>`, correct response `100#0` and the end token.
"""

import re
from typing import Any

from topr.sampling import Sampling
from topr.tasks.task import Grade, Problem, exact_grade
from topr.tasks.verifier import Verifier


class ArithmeticVerifier(Verifier):
    """Judges solutions of `Arithmetic`, from any trajectory file."""

    name = "arithmetic_verifier"
    requires_end = True
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12)
    verdicts = {"1": True, "0": False}

    def prompt(self, problem: Problem, tokenizer: Any) -> str:
        """The question and the candidate solution."""
        return f"{problem.prompt}{problem.solution}>"

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the verdict after the digits is the gold; invalid in any other form."""
        found = re.fullmatch(r"[01]*#([01])", response)
        return exact_grade(found[1] if found else None, gold)
