"""The model: load.py (folder to model, checked), flat.py and forward.py (batch to nats), save.py (model to folder)."""
