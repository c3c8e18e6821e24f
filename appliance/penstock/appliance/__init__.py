"""Coordinator: hands out the work and keeps the cluster state."""
