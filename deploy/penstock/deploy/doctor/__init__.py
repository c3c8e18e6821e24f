"""`penstock doctor`: checks of a machine, a cluster, a loader or a checkpoint."""
