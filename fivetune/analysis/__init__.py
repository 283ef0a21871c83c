"""Analyses of predictions beyond their mean score: how sure, how calibrated, for whom. Plain numpy, no torch.

In: Scores of a metric, or prediction lines of an evaluation. Out: intervals, differences, curves, slices.
"""
