"""Experiments of many runs: sweeps over a grid or list, studies with a sampler; each run in its own process."""
