"""Tables of Delta Lake and Iceberg: the files, columns and deleted rows of a snapshot."""
