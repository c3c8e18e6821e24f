"""Coordinator: assigns slots to workers and keeps the cluster state."""
