"""Batches that user code builds where they will be sent from."""
