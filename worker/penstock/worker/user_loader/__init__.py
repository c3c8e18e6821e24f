"""Surroundings of a user's loader in its process: generators, worker information, skipped and synthetic batches."""
