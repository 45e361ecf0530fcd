"""Make the embedded task's policies and problems; data/README.md has the commands.

python data/arithmetic/make.py base …: a base policy, and problems.
python data/arithmetic/make.py verifier …: a verifier's base policy.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import yaml
from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeInt, Path_fr, PositiveInt
from numpy.random import Generator, default_rng

from data.arithmetic.imitation import imitate, make_policy, make_tokenizer
from data.arithmetic.problems import END, LETTERS, SEPARATORS, Setting, demonstration, problems_of
from topr.io import write_text
from topr.io.commands import ArgumentParser, command
from topr.policy import export_policy, load_policy
from topr.tasks import Arithmetic

# of critiques: without steps, without a verdict, and of wrong digits
DIRECT = 0.20
MISSING = 0.12
WRONG = 0.10
Examples = Iterator[tuple[str, str]]  # prompts, and responses with the end token


def base(out: Path, setting: Path_fr, seed: NonNegativeInt = 0):
    """Write a base policy, train, val and test problems.

    Args:
        out: folder to write
        setting: file such as setting.yaml
        seed: of everything; another seed gives other problems, too
    """
    given = yaml.safe_load(setting.get_content())
    for number, (split, count) in enumerate(given["problems"].items(), 1):
        lines: dict = {}  # different ones
        for problem in problems_of(given, split, default_rng([seed, number])):
            lines[json.dumps(problem) + "\n"] = None
            if len(lines) == count:
                break
        write_text(out / f"{split}.jsonl", "".join(lines))

    torch.manual_seed(seed)
    policy = make_policy(make_tokenizer(LETTERS + SEPARATORS if given["filler"] else ""))
    examples = demonstrations(given, default_rng([seed, 0]))
    for steps, lr in given["stages"]:
        imitate(policy, examples, steps, lr, given["batch_size"])
    export_policy(policy, out / "base")


def verifier(
    out: Path, setting: Path_fr, policy: str, seed: NonNegativeInt = 0, steps: PositiveInt = 400
):
    """Write a verifier's base policy: a policy that has imitated critiques.

    Args:
        out: folder to write
        setting: file such as setting.yaml
        policy: folder of the policy to begin with
        seed: of everything
        steps: supervised updates
    """
    judge = load_policy(policy)
    imitate(judge, critiques(yaml.safe_load(setting.get_content()), default_rng([seed, 0])), steps)
    export_policy(judge, out / "base")


def demonstrations(setting: Setting, rng: Generator) -> Examples:
    """Endless problems of the base split with imperfect solutions."""
    for problem in problems_of(setting, "base", rng):
        prompt = problem["prompt"]
        yield prompt, demonstration(setting, setting["errors"], prompt, rng)


def critiques(setting: Setting, rng: Generator) -> Examples:
    """Endless verifier prompts with imperfect critiques.

    The solutions are imperfect, too: correct and incorrect ones in turn.
    """
    errors = setting["errors"]
    flawless: Setting = dict.fromkeys(errors, 0) | {"carry": {}}
    wanted = True
    for problem in problems_of(setting, "base", rng):
        prompt = problem["prompt"]
        correct = demonstration(setting, flawless, prompt, rng)
        for _ in range(100):
            solution = demonstration(setting, errors, prompt, rng).removesuffix(END)
            if (Arithmetic().grade(solution, problem["gold"]).reward > 0) == wanted:
                yield f"{prompt}{solution}>", critique(correct, solution, wanted, rng) + END
                wanted = not wanted
                break


def critique(correct: str, solution: str, is_correct: bool, rng: Generator) -> str:
    """An imperfect critique of a solution, by comparison with a correct one."""

    def judge(is_right):
        return str(int(is_right ^ (rng.random() < WRONG)))

    expected = correct.split(";")
    steps = ""
    for number, step in enumerate(solution.split(";")[:-1]):
        steps += judge(step in expected[number : number + 1])
    verdict = f"#{judge(is_correct)}"
    if rng.random() < DIRECT:
        return verdict
    if rng.random() < MISSING:
        return steps
    return steps + verdict


def main():
    torch.set_num_threads(1)  # fast enough for this size, and the same bits everywhere
    with command():
        auto_cli([base, verifier], as_positional=False, parser_class=ArgumentParser)


if __name__ == "__main__":
    main()
