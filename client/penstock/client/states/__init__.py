"""Saved states of loaders, and the references to user code that other processes import."""
