"""The ranks of a run: collectives, error propagation, sharded tensors."""
