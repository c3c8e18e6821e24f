"""Rows of a ShardLoader's batches: which sample of which shard a row is, and which box gets it."""
