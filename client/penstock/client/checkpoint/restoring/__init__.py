"""Restore of a checkpoint: index, verified reads, entries."""
