"""Tasks: problems, prompts and graders. Not here: sampling, files of trajectories."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    arithmetic=["Arithmetic", "ArithmeticVerifier"],
    gsm8k=["GSM8K"],
    math=["MATH"],
    task=["Grade", "Problem", "Task"],
    verifier=["Verifier"],
)
