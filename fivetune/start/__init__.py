"""From a data file to a recipe: columns.py -> guess.py (the task, with reasons) -> plan.py -> recipe.py, files.py."""
