"""`ShardLoader`, its sources, and the layers that convert, mix and pack samples, all in a fixed number of shards."""
