"""The benchmarks of evaluate.py: name, task, file or hub data set of its problems, verifier of its solutions."""

from topr.tasks import GSM8K, MATH, Arithmetic, ArithmeticVerifier, Task, Verifier
from topr.tasks.arithmetic.task import Filler

STRONG = Arithmetic(operations=(2, 5), filler=Filler())  # as far as grades and the length of responses go
BENCHMARKS: dict[str, tuple[Task, str, Verifier]] = {
    "arithmetic": (Arithmetic(), "data/arithmetic/test.jsonl", ArithmeticVerifier(balance=False)),
    "arithmetic_strong": (STRONG, "data/arithmetic/strong/test.jsonl", ArithmeticVerifier(balance=False)),
    "gsm8k": (GSM8K(), "openai/gsm8k/main:test", Verifier(GSM8K(), balance=False)),
    "math500": (MATH(), "HuggingFaceH4/MATH-500:test", Verifier(MATH(), balance=False)),
}
