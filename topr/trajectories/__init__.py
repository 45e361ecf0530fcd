"""The trajectory file: read, write, validate; import, inspect and curate.
Not here: grading of responses, batching."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    file=["Trajectory", "read_metadata", "read_trajectories", "write_trajectories"],
    scoring=["add_log_probs"],
)
