"""Left-to-right arithmetic, which a policy learns on a laptop in a minute.

Prompt `9+3*2-4>`, correct response `9+3=12;12*2=24;24-4=20;#20` and the end token.
`data/arithmetic/make.py` makes problems and a base policy.
"""

import re

from jsonargparse.typing import PositiveInt

from topr.sampling import Sampling
from topr.tasks.task import Grade, Task, exact_grade
from topr.tasks.verifier import Verifier


class Arithmetic(Task):
    """Left-to-right arithmetic on integers.

    Args:
        max_new_tokens: longest response that `evaluate.py` samples; `train.py` takes data.sampling
    """

    name = "arithmetic"
    requires_end = True

    def __init__(self, max_new_tokens: PositiveInt = 40):
        self.sampling = Sampling(top_k=0, max_new_tokens=max_new_tokens)

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the response ends in `#` and the gold; invalid without one numeric `#answer`."""
        found = re.fullmatch(r"[^#]*#0*([0-9]{1,20})", response)
        return exact_grade(found[1] if found else None, gold)


class ArithmeticVerifier(Verifier):
    """Judges solutions of `Arithmetic`: `1` or `0` for every step, then `#` and the verdict.

    Prompt `9+3*2-4>9+3=12;12*2=25;25-4=21;#21>`, correct response `100#0` and the end token.
    """

    name = "arithmetic_verifier"
    requires_end = True
    sampling = Sampling(top_k=0, max_new_tokens=12)
    verdicts = ("1", "0")

    def prompt(self, problem, tokenizer) -> str:
        """The question and the candidate solution."""
        return f"{problem.prompt}{problem.solution}>"

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the verdict behind the digits is the gold; invalid in any other form."""
        found = re.fullmatch(r"[01]*#([01])", response)
        return exact_grade(found[1] if found else None, gold)
