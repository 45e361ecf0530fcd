"""The trajectory file: read, write, validate, import, inspect, curate (`python -m topr.trajectories`).
Not here: grading of responses, batching."""

from topr.trajectories.file import SCHEMA, Trajectory, add_log_probs, agreed, batches, read_metadata  # isort: skip
from topr.trajectories.file import read_trajectories, write_tables, write_trajectories  # isort: skip
