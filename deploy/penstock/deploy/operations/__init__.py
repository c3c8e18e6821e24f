"""Implementation of the commands for people: status, states, settings, drains."""
