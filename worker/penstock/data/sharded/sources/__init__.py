"""Sources in logical shards, made from pieces, streams and files."""
