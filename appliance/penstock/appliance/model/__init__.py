"""Entities of the coordinator and its limits: plain data."""
