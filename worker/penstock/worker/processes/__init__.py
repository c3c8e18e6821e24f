"""The daemon's child processes: how they are started, watched, spoken to and ended."""
