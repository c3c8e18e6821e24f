"""Indexes of datasets as columns, which are made once for all processes of a host."""
