"""Logs, counters, the catalogue of metrics, and a cluster's status."""
