"""Restoring of a checkpoint: reads its index and the values that a rank needs, verifies them, and loads them into the
entries of a state (modules, optimizers, loaders)."""
