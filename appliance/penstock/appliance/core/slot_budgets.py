"""Budgets of slots by credential (`--max-slots`), and the words for what a box without workers waits for.

A box counts with all its slots from when it gets workers until it gives them back, also while a slot is recovered: so a
recovery never waits for a budget. Which of several waiting boxes comes next is not promised."""

from __future__ import annotations

from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Box
from penstock.proto.rpc.credentials.tokens import NAME_MAX

_JOBS_SHOWN = 3


def exceeded(cluster: ClusterState, box: Box) -> bool:
    """Return whether the slots of a box without workers would exceed the budget of its credential."""
    budget = cluster.limits.slot_budget(box.credential)
    return budget is not None and cluster.in_use[box.credential].total() + len(box.slots) > budget


def why_waits(cluster: ClusterState, box: Box) -> str:
    """Return what the box waits for before it gets workers; "" if it has had them, or if no worker has a free slot."""
    if box.working:
        return ""
    count, budget = len(box.slots), cluster.limits.slot_budget(box.credential)
    free, slots = cluster.free_capacity.room(box.opening)
    whose = box.credential if len(box.credential) <= NAME_MAX else "its token"
    at_once = f"it waits for {count} slots at once"
    if budget is not None and count > budget:
        return f"{at_once}, and the budget of {whose} is {budget}. Lower num_workers_per_box, or raise --max-slots"
    if budget is not None and exceeded(cluster, box):
        jobs = cluster.in_use[box.credential]
        names = ", ".join([*sorted(jobs)[:_JOBS_SHOWN], *(["..."] if len(jobs) > _JOBS_SHOWN else [])])
        return f"it waits for the budget of {whose}: {jobs.total()} of {budget} slots are in use by {names}"
    if 0 < slots < count:
        return f"{at_once}, and all workers together have {slots}. Start more workers, or lower num_workers_per_box"
    return f"{at_once}: {free} are free" if 0 < free < count else ""
