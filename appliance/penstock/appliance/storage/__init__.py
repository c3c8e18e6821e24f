"""The coordinator's disk: the journal, and the snapshots with their index."""
