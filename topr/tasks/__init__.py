"""Tasks: problems, prompts and graders. Not here: sampling, files of trajectories."""

from topr.tasks.arithmetic import Arithmetic, ArithmeticVerifier
from topr.tasks.gsm8k import GSM8K
from topr.tasks.math import MATH
from topr.tasks.task import Grade, Problem, Task
from topr.tasks.verifier import Verifier
