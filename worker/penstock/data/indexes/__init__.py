"""Indexes of datasets as columns (arrays with a number for each shard), made once for all processes of a host."""
