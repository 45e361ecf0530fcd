"""Tasks: problems, prompts and graders."""

from importlib import import_module

from topr.tasks.task import Grade, Problem, Task

__all__ = ["GSM8K", "MATH", "Arithmetic", "ArithmeticVerifier", "Grade", "Problem", "Task", "Verifier"]
MODULES = {
    "Arithmetic": "arithmetic",
    "ArithmeticVerifier": "arithmetic_verifier",
    "GSM8K": "gsm8k",
    "MATH": "math",
    "Verifier": "verifier",
}


def __getattr__(name: str):
    # imported on demand: `python -m topr.tasks.arithmetic` would otherwise run a module that is already loaded
    if name in MODULES:
        return getattr(import_module(f"topr.tasks.{MODULES[name]}"), name)
    raise AttributeError(f"module 'topr.tasks' has no attribute {name!r}; it has {', '.join(__all__)}")
