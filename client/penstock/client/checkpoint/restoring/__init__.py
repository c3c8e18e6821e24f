"""The way of a restore: index, verified reads, entries."""
