"""Sources in logical shards, made of pieces, streams and files."""
