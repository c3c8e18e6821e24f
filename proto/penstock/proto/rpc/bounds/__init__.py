"""Limits on what a peer may make this process hold, parse or do with one message."""
