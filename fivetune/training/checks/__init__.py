"""Checks before and while a run trains."""
