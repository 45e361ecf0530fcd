"""The trajectory file: read, write, validate, import, inspect, curate
(`python -m topr.trajectories`). Not here: grading of responses, batching."""

from topr.lazy import lazy

__getattr__ = lazy(
    __name__,
    file=["SCHEMA", "Trajectory", "add_log_probs", "agreed", "batches", "read_metadata"]
    + ["read_trajectories", "write_tables", "write_trajectories"],
)
