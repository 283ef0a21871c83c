"""How answers are judged: metrics, and what they mean (intervals, calibration, slices)."""
