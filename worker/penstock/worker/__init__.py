"""The input node: a daemon that runs users' loaders in child processes and streams their batches."""

from penstock.proto.assignment import current_assignment

__all__ = ["current_assignment"]
