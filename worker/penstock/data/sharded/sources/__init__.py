"""Sources in logical shards: LogicalShards, made from a user's pieces (lists, datasets, files), and Savable, made from
a user's streams."""
