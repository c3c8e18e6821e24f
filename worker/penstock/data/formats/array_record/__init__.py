"""ArrayRecord files, read by the package array_record."""
