"""Lanes, which carry batches from a runner to the training loop: rings of shared memory on one host, and TCP between
hosts."""
