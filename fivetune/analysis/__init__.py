"""What predictions say beyond their mean: how sure, how calibrated, for whom. Plain numpy, no torch.

In: Scores of a metric, or prediction lines as evaluate.py writes them. Out: intervals, differences, curves, slices.
"""
