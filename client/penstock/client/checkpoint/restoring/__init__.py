"""Restoring of a checkpoint: its index, the values that a rank needs, and the entries of a state to load them into."""
