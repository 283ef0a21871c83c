"""Summaries of traces: torch.profiler's Chrome traces and Nsight Systems captures."""
