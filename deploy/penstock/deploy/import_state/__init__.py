"""Implementation of `penstock import-state`: converts a position of another library to a state of Penstock."""
