"""Policies of the coordinator, as functions of its entities: placement, leases, quarantine, bottlenecks."""
