"""Limits on the memory and time that one message of a peer can take in this process."""
