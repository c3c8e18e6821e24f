"""Lance datasets, read by the package pylance."""
