"""Conversion of datasets to MDS or Parquet, from any format that Penstock reads."""
