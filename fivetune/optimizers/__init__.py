"""Optimizers, one per file.

An optimizer's file holds one options class with `lr` (the peak learning rate), `build(groups)` (a
torch.optim.Optimizer over parameter groups), `effective_lr(optimizer)` (the learning rate that the last step applied,
or None) and `state_bytes_per_parameter` (for fp32 weights). torch is imported inside the methods.
"""
