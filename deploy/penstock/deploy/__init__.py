"""Top layer: the command line and the launchers."""
