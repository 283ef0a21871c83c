"""Estimates of a run before it starts: memory of a rank and time of a step, by strategy, without torch.

In: the shape of a model, the batch, the device. Out: an Estimate per strategy, and which to take.
"""
