"""The generative verifier of the embedded task: `1` or `0` for every step of a solution, then `#` and the verdict.

Prompt `9+3*2-4>9+3=12;12*2=25;25-4=21;#21>`, response `100#0` and the end token. Its base policy and its problems:

    python -m topr.tasks.arithmetic_verifier --seed 1 --data data/arithmetic --out data/arithmetic/verifier
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from topr.io import ArgumentParser, check_counts, check_folder, command
from topr.sampling import Sampling
from topr.tasks.arithmetic import APPLY, Arithmetic, Errors
from topr.tasks.imitation import imitate
from topr.tasks.task import Grade, Problem
from topr.tasks.verifier import Verifier

DIRECT, MISSING, WRONG = 0.20, 0.12, 0.10  # rates of critiques without steps, without verdict; of wrong digits


class ArithmeticVerifier(Verifier):
    """Judge solutions of `Arithmetic`, the trajectories of any file."""

    name = "arithmetic_verifier"
    requires_end = True
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12)
    verdicts = {"1": True, "0": False}

    def __init__(self, balance: bool = True):
        super().__init__(balance=balance)

    def prompt(self, problem: Problem, tokenizer) -> str:
        """The question and the candidate as they stand."""
        return f"{problem.prompt}{problem.solution}>"

    def grade(self, response: str, gold: str) -> Grade:
        """+1 if the verdict behind the digits is the gold; invalid in any other form."""
        found = re.fullmatch(r"[01]*#([01])", response)
        if found is None:
            return Grade(-1.0, False, None)
        return Grade(1.0 if found[1] == gold else -1.0, True, found[1])


def critique(prompt: str, solution: str, correct: bool, rng: np.random.Generator) -> tuple[str, bool]:
    """An imperfect critique and that it ends, the base policy's training text."""
    first, *rest = re.findall(r"[0-9]+|[-+*]", prompt)
    value, right = int(first), []
    for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
        result = APPLY[symbol](value, int(operand))
        right.append(f"{value}{symbol}{operand}={result}")
        value = result
    steps = solution.split("#")[0].split(";")[:-1]
    digits = [step == expected for step, expected in zip(steps, right + [""] * len(steps), strict=False)]
    written = "".join(str(int(digit ^ (rng.random() < WRONG))) for digit in digits[:9])
    verdict = f"#{int(correct ^ (rng.random() < WRONG))}"
    if rng.random() < DIRECT:
        return verdict, True
    return written + ("" if rng.random() < MISSING else verdict), True


def critiques(task: Arithmetic, rng: np.random.Generator) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Verifier prompts and imperfect critiques without end, of correct and incorrect solutions in turn."""
    wanted = True
    for prompt in task.base(rng):
        gold = re.findall(r"#(\d+)", task.demonstration(prompt, Errors(0, 0, 0, 0, 0), rng)[0])[0]
        for _ in range(100):
            solution, finished = task.demonstration(prompt, Errors(), rng)
            if (finished and task.grade(solution, gold).reward > 0) == wanted:
                yield f"{prompt}{solution}>", critique(prompt, solution, wanted, rng)
                wanted = not wanted
                break


def teach(task: Arithmetic, model, tokenizer, seed: int, steps: int) -> None:
    """Make a verifier of the base policy, in place, by imperfect critiques."""
    import torch

    torch.manual_seed(seed)
    imitate(model, tokenizer, critiques(task, np.random.default_rng([seed, 0])), steps)


def make(data: Path, out: Path, seed: int, steps: int, samples: int) -> None:
    """Write the verifier's base policy, and solutions of the validation and test problems for it to judge."""
    from topr.evaluation import describe, sample_part
    from topr.policy import export_policy, load_policy
    from topr.sampling import LocalSampler
    from topr.tokenizer import load_tokenizer

    base, task = str(data / "base"), Arithmetic()
    model, tokenizer = load_policy(base), load_tokenizer(base)
    for split in ("val", "test"):
        problems = task.problems(data / f"{split}.jsonl")
        about = describe(base, tokenizer, "32-true", task, problems, samples, task.sampling, seed)
        how = samples, task.sampling, seed, 16384
        sample_part(out / f"{split}.parquet", about, LocalSampler(), model, tokenizer, task, problems, *how)
    teach(task, model, tokenizer, seed, steps)
    export_policy(model, tokenizer, out / "base")
    print(f"wrote base, val.parquet and test.parquet under {out}")


def main() -> None:
    parser = ArgumentParser(
        prog="python -m topr.tasks.arithmetic_verifier",
        description="Make a verifier's base policy from that of the embedded task, and solutions for it to judge.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic"), help="folder of the embedded task")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="supervised updates of the base policy")
    parser.add_argument("--samples", type=int, default=4, help="solutions per problem")
    with command():
        args = parser.parse_args()
        import torch

        torch.set_num_threads(1)  # as fast as more for a model of this size, and the same bits everywhere
        check_counts("--", steps=args.steps, samples=args.samples)
        check_folder("--out", args.out)
        make(args.data, args.out, args.seed, args.steps, args.samples)


if __name__ == "__main__":
    main()
