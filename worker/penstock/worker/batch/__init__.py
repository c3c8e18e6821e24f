"""Batches that user code builds directly in the shared memory from which batches are sent."""
