"""Batches that user code builds in the memory they are sent from."""
