"""Samplers: prompts in, responses out, both as token ids; decoded in this process or on servers.
Not here: tokenising prompts, grading, files."""

from topr.sampling.base import Response, Sampler, Sampling, Stop
from topr.sampling.local import LocalSampler
from topr.sampling.server import ServerSampler
