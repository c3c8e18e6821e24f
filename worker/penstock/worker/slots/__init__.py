"""Slots on a worker: their runners, their restart points, answers and reports."""
