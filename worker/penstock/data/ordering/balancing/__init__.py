"""Rows dealt to steps and boxes by cost."""
