"""Lanes: rings of shared memory between processes of a host, and their frames over TCP between hosts."""
