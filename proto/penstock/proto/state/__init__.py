"""Positions and states: their encoding, the restartable protocol, generators, and checkpoints on disk."""
