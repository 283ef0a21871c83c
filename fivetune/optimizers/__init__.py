"""Optimizers, one per file.

An optimizer's file holds one options class with `lr` (the peak learning rate), `build(groups)` (a
torch.optim.Optimizer over parameter groups), `effective_lr(optimizer)` (the learning rate that the last step applied,
or None), `state_bytes_per_parameter` (for fp32 weights) and `lr_range` (the rates at which T5 fine-tuning is known to
work). torch is imported inside the methods. Two more are optional: `relative_step`, a field by which the optimizer
computes its own rate, and `build_for_tables(groups)`, which builds the optimizer of one process on a CPU.
"""
