"""`ShardLoader` with its sources, whose data are cut into a fixed number of logical shards, and the layers that
convert, mix and pack samples."""
