"""One optimizer step, and the parts that it needs."""
