"""Parquet files: their index, and readers of their rows."""

from penstock.data.formats.parquet.parquet_index import index_parquet, parquet_shards
from penstock.data.formats.parquet.parquet_reader import ParquetReader

__all__ = ["ParquetReader", "index_parquet", "parquet_shards"]
