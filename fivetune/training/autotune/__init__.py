"""What is tried before or beside a run: forward kind, CUDA graphs, micro-batch size, learning rate."""
