"""A user's loader, and the code that brings it to any position in its stream."""
