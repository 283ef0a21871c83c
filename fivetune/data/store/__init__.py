"""From raw records to rows of token ids on disk, and from rows to batches."""
