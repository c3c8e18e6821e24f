"""Credentials of callers: tokens, their roles, the callers that show one, and lane tickets."""
