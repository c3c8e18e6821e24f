"""Web server of a process, and its metrics for Prometheus."""
