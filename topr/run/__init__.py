"""What makes a run its own: folder, checkpoints, identity of all that decides it."""
