"""Saved states, and what of a loader goes into them."""
