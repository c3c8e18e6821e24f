"""Conversion of a batch to one aligned region of memory, and back: structure, flattening, assembly, digests."""
