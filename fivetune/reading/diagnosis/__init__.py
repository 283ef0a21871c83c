"""Diagnosis of a run: statistics of its records, rules over them, verification of predicted gains."""
