"""Implementation of `penstock replay`, which recreates a delivered batch."""
