"""What a sharded dataset's files hold: indexes, encodings, compressions, hashes; read and written."""
