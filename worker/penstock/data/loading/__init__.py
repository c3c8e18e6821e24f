"""Loaders that make batches from map-style datasets (MapLoader) and from StreamingDatasets (StreamingLoader), and their
parts."""
