"""Sample, grade, score, write; metrics with intervals; tables and plots.
Not here: which problems to sample, when to evaluate."""

from topr.evaluation.benchmarks import BENCHMARKS
from topr.evaluation.metrics import (
    PerProblem,
    group_by_problem,
    maj_at_k,
    pass_at_k,
    per_problem,
    summarise,
)
from topr.evaluation.pipeline import SamplingJob, check_prompts, derived_seed, explain_out_of_memory
from topr.evaluation.pipeline import read_parts, sample_and_grade
