"""Command line of Penstock, and the launchers of its daemons."""
