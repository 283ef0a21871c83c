"""Strategies: how the model is placed on devices, one per file.

A strategy's file holds one options class with `wrap(model, device)` (the model as it is trained),
`unwrap(model)` (the plain transformers model inside), `clip(model, max_norm)` (global gradient norm
before clipping, as a tensor) and `accumulate(model, is_last)` (context of one micro-batch's backward).
"""
