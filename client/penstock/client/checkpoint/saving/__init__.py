"""Saving of a checkpoint: a plan that the ranks agree on, copies in shared memory, and each rank's writer process."""
