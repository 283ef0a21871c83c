"""From sources to batches: records.py -> a task -> encode.py -> store.py -> batch.py, in the order of stream.py."""
