"""Credentials of callers: tokens, the proof that a caller knows one, their roles, and lane tickets."""
