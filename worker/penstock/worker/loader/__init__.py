"""A user's loader, and how it is brought to any position in its stream."""
