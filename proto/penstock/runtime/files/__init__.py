"""Safe work with files: atomic writes, private folders, and files in folders that other users can write to."""
