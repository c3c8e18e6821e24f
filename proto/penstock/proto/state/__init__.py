"""Positions and states: how they are encoded, the restartable protocol, random generators, and checkpoints on disk."""
