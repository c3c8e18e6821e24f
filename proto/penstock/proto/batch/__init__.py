"""A batch as one aligned region of memory, and back: structure, flattening, assembly, digests."""
