"""Writers of sharded datasets."""
