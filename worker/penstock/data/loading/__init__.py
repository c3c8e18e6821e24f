"""Loaders that make batches from map-style datasets (MapLoader) and StreamingDatasets (StreamingLoader), and their
parts."""
