"""The board: a local page over all runs of folders, read from their run directories; without torch.

rows.py reads the list of runs, details.py one run, app.py serves both and the pages of reports and comparisons.
"""
