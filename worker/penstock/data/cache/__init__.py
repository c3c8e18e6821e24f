"""A host's cache of shards: downloads, locks, prefetch, eviction."""
