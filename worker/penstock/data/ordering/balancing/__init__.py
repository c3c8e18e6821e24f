"""Rows assigned to steps and boxes by cost."""
