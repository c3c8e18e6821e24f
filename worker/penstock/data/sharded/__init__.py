"""Sources in logical shards that are read sequentially, and the layers on top of them."""
