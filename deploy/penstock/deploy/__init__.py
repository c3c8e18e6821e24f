"""The top floor: the command line and the launchers."""
