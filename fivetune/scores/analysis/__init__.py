"""Analyses of predictions beyond the mean score: confidence intervals, calibration, slices. Plain numpy, no torch.

In: Scores of a metric, or prediction lines of an evaluation. Out: intervals, differences, curves, slices.
"""
