"""Training: run.py fine-tunes by a recipe; the folders hold its state, its checks, its choices and its plugins.

The folder is named training, not train, because `fivetune.train` is the function.
"""
