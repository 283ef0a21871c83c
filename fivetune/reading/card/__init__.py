"""The model card of a run, from its records."""
