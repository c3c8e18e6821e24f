"""Helper processes for one task with a slot's loader each, and the values they need."""
