"""Formats of a sharded dataset's files: indexes, encodings, compressions, hashes; read and written."""
