"""Slots on a worker: their runners, their restart points and the verification of these, answers and reports."""
