"""The state of a run: checkpoints, resuming, and its copy in a bucket."""
