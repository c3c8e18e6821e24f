"""Values of columns that are decoded in blocks: what the readers of Arrow, Parquet and Lance share."""
