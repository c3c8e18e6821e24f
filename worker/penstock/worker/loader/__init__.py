"""A user's loader, and how it is brought to any place in its stream."""
