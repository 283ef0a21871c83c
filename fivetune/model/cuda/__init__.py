"""Triton kernels of the CUDA path, one file per part of the step; they need the package triton.

attention.py (ragged attention with a relative bias), norm.py, pointwise.py (dropout, residual, activations),
cross_entropy.py, rows.py (gradients of tables), optimizer.py (clip, AdamW), random.py (the dropout masks),
tiles.py (block sizes).

graphed.py and static_step.py replay whole steps as CUDA graphs. dispatch.py selects kernels, kernel_trial.py tests them
on a device before they are used.

Every kernel also runs in Triton's interpreter (TRITON_INTERPRET=1, tensors on the CPU), which the tests use.
"""
