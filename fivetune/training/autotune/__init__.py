"""Trials that choose settings: forward kind, CUDA graphs, micro-batch size, learning rate."""
