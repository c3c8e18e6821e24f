"""Logs, counters, the catalogue of metrics, and the view of a cluster's status."""
