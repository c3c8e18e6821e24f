"""Formats of a sharded dataset's files: index, encodings of values, compressions. Modules here read and write them."""
