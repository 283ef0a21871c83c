"""What a trace says: torch.profiler's Chrome traces and Nsight Systems captures, as a summary."""
