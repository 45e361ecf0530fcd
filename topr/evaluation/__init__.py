"""Sample, grade, score; metrics with intervals; tables and plots.
Not here: which problems to sample, when to evaluate."""
