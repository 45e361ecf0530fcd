"""The trajectory file: read, write, validate; import, inspect and curate.
Not here: grading of responses, batching."""

from topr import lazy

__getattr__ = lazy(
    __name__,
    curate=["agreed"],
    file=["SCHEMA", "Trajectory", "read_metadata", "read_table", "read_trajectories"]
    + ["write_table", "write_trajectories"],
    scoring=["add_log_probs"],
)
