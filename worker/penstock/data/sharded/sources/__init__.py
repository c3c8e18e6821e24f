"""Sources in logical shards: LogicalShards, made from pieces (lists, datasets, files), and Savable, from streams."""
