"""A run's state at a step: gathered from its slots, kept for a while, sent in parts."""
