"""The daemon's child processes: starting, watching, messaging and ending them."""
