"""Ranges of remote files that are fetched without the rest of the file."""
