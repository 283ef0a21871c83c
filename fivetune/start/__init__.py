"""From a data file to a recipe: columns.py (values), roles.py (names) -> survey.py (evidence) -> readings.py ->
choose.py (the best reading, or a doubt) -> plan.py (sets, model, lengths) -> recipe.py, files.py.
"""
