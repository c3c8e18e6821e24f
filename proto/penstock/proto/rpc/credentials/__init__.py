"""Credentials of callers: tokens, their roles, and lane tickets."""
