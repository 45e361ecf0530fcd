"""The benchmarks that evaluate.py knows by name."""

from dataclasses import replace
from pkgutil import resolve_name

from topr.io import InputError, explained
from topr.tasks import GSM8K, MATH, Arithmetic, Task

# sampled as papers on reasoning do (arXiv:2501.12948); most models need a server for that
COMPETITION = MATH()
COMPETITION.sampling = replace(
    MATH.sampling, temperature=0.6, top_k=0, top_p=0.95, max_new_tokens=32768
)

# task, and file or hub data set of its problems
BENCHMARKS = {
    "arithmetic": (Arithmetic(), "data/arithmetic/test.jsonl"),
    "arithmetic_strong": (Arithmetic(max_new_tokens=73), "data/arithmetic/strong/test.jsonl"),
    "gsm8k": (GSM8K(), "openai/gsm8k/main:test"),
    "svamp": (GSM8K(), "ChilleD/SVAMP:test"),
    "multiarith": (GSM8K(), "ChilleD/MultiArith:test"),
    "asdiv": (GSM8K(skip_unanswered=True), "EleutherAI/asdiv:validation"),
    "math500": (MATH(), "HuggingFaceH4/MATH-500:test"),
    "aime24": (COMPETITION, "HuggingFaceH4/aime_2024:train"),
    "aime25": (COMPETITION, "math-ai/aime25:test"),
    "amc23": (COMPETITION, "math-ai/amc23:test"),
    "minerva": (COMPETITION, "math-ai/minervamath:test"),
    "olympiadbench": (COMPETITION, "Hothan/OlympiadBench/OE_TO_maths_en_COMP:train"),
}


def find_benchmark(name: str, file: str) -> tuple[Task, str]:
    """Task and problems of a benchmark, or of a user's task, which is named by its class path.

    Args:
        name: of a benchmark or a class.
        file: problems in place of the benchmark's own; a class has none of its own.

    Raises:
        InputError: there is no such benchmark or class, or it has no problems.
    """
    if name in BENCHMARKS:
        task, source = BENCHMARKS[name]
        return task, file or source
    with explained(
        f"--benchmark {name!r} is unknown",
        remedy=f"choose from {', '.join(BENCHMARKS)}, or a task of your own: my_task.Parity=FILE",
    ):
        task = resolve_name(name)()
    if not file:
        raise InputError(f"--benchmark {name} has no problems of its own; give {name}=FILE")
    return task, file
