"""The benchmarks that evaluate.py knows by name."""

from importlib import import_module

from topr.io import explained
from topr.tasks import GSM8K, MATH, Arithmetic, ArithmeticVerifier, Task, Verifier

# task, and file or hub data set of its problems
BENCHMARKS = {
    "arithmetic": (Arithmetic(), "data/arithmetic/test.jsonl"),
    "arithmetic_strong": (Arithmetic(max_new_tokens=73), "data/arithmetic/strong/test.jsonl"),
    "gsm8k": (GSM8K(), "openai/gsm8k/main:test"),
    "math500": (MATH(), "HuggingFaceH4/MATH-500:test"),
}


def find_benchmark(name: str) -> tuple[Task, str]:
    """Task and problems of a benchmark, or a user's task, which is named by its class path and has
    no problems of its own ("").

    Raises:
        InputError: there is no such benchmark or class.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    module, _, kind = name.rpartition(".")
    remedy = f"choose from {', '.join(BENCHMARKS)}, or a task of your own: my_task.Parity=FILE"
    errors = ImportError, AttributeError, ValueError
    with explained(f"--benchmark {name!r} is unknown", errors, remedy):
        return getattr(import_module(module), kind)(), ""


def find_verifier(task: Task) -> Verifier:
    """The task of judging solutions of a task."""
    return ArithmeticVerifier() if isinstance(task, Arithmetic) else Verifier(task)
