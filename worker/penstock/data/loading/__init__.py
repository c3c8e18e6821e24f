"""Loaders over map-style and streaming datasets: positions, reading ahead, collating."""
