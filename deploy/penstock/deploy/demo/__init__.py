"""Implementation of `penstock demo`."""
