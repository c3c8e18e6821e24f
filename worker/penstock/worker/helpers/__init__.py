"""Helper processes, which do single tasks with a slot's loader, and the large values that these tasks need."""
