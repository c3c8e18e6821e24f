"""Environment of a user's loader in its process: random generators, worker information, skipped and synthetic
batches."""
