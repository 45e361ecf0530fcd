"""The paper's claims, measured on the embedded task: experiments, criteria and figures.
Not here: training, sampling, grading, curation."""
