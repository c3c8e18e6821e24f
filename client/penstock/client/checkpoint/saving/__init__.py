"""Saving of a checkpoint: the ranks agree on a plan, each copies its values to shared memory, and its writer process
writes them to the disk."""
