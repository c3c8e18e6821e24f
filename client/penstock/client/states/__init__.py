"""Saved states, and the parts of a loader in them."""
