"""Disk of the coordinator: the journal, the snapshots, and the index of snapshots."""
