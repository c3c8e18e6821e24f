"""Sources that are read along, in logical shards; and the layers on top of them."""
