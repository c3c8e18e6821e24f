"""The web server of a process, and its metrics for Prometheus."""
