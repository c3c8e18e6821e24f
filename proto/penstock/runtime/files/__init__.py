"""Files that are written whole, folders that are private, and files in folders that others can write to."""
