"""A run, read without torch: diagnosis, comparison, report and model card."""
