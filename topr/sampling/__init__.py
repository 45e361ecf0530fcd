"""Samplers: prompts in, responses out, both as token ids; decoded in this process or on servers.
Not here: tokenising prompts, grading, files."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    base=["Response", "Sampler", "Sampling"],
    local=["LocalSampler"],
    server=["ServerSampler"],
)
