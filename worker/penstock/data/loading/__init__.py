"""MapLoader and StreamingLoader, which make batches from map-style and streaming datasets, with what they consist
of."""
