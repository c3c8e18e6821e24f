"""Layers over a source in logical shards: mixtures, packing, shuffles, functions of samples."""
