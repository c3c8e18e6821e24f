"""Credentials of callers: tokens, their proof, their roles, and lane tickets."""
