"""Core of the coordinator: a state machine without I/O, except for its journal."""
