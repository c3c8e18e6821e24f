"""Implementation of the commands for people: status, states, settings, drains, and the start of daemons."""
