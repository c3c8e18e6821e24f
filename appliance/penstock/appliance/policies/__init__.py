"""Decisions that are functions of the model: placement, leases, quarantine, bottlenecks."""
