"""Sample, grade, score; metrics with intervals; tables and plots.
Not here: which problems to sample, when to evaluate."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    benchmarks=["BENCHMARKS"],
    metrics=["maj_at_k", "pass_at_k", "per_problem", "summarise"],
    pipeline=["SamplingJob", "read_parts"],
)
