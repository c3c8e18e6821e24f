"""Decisions of the coordinator that are pure functions of its entities: placement, leases, quarantine, bottlenecks."""
