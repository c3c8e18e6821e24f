"""Loaders over map-style and streaming datasets: positions, read-ahead, collation."""
