"""Batches that user code builds directly in the shared memory that they are sent from."""
