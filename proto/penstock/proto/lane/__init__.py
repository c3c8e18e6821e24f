"""Lanes, which carry batches from a runner to the training loop: rings (shared memory) on one host, TCP between
hosts."""
