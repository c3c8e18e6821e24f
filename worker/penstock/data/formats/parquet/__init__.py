"""Parquet files: their footers, row groups and values."""
