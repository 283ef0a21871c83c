"""Publishing: the model card of a run, and its upload to a model hub.

card.py writes the card from the records of a run, files.py lists what is uploaded and refuses secrets and data, hub.py
uploads it.
"""
