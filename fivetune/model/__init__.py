"""The model: load.py (folder to model, checked), forward.py (batch to nats), save.py (model to folder)."""
