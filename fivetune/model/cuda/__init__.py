"""Triton kernels of the CUDA path, one file per part of the step; they need the package triton.

attention.py (ragged attention with a relative bias), norm.py, pointwise.py (dropout, residual, activations),
optimizer.py (clip, AdamW, bf16 copy), random.py (the dropout masks), tiles.py (block sizes).

Every kernel runs under Triton's interpreter too (TRITON_INTERPRET=1, tensors on the CPU): so the tests run them.
"""
