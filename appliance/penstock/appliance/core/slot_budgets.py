"""When a box may get workers: room for whole runs, budgets of slots by credential (`--max-slots`), and the words for
what a box without workers waits for.

A run gets its first workers if there is room, at the workers and in its budget, for all its boxes beside those that
runs with workers still lack, open or not. So its later boxes find room as they open: two runs that each held one of
two boxes would both wait for ever. Runs of which no worker can serve both take nothing from each other. All this counts
while workers stay; when some are lost, boxes may have to wait until as many slots are there again.

A box counts in its budget with all its slots from when it gets workers until it gives them back, also while a slot is
recovered: so a recovery never waits for a budget. Which of several waiting runs comes next is not promised."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, Box
from penstock.proto.rpc.credentials.tokens import NAME_MAX

_NAMES_SHOWN = 3


def at_once(attempt: Attempt) -> int:
    """Return the slots for which there must be room before a box of the attempt gets workers."""
    return attempt.num_workers if attempt.working else attempt.lacks


def exceeded(cluster: ClusterState, attempt: Attempt, box: Box) -> bool:
    """Return whether the slots of a box without workers would exceed the budget of its credential."""
    budget = cluster.limits.slot_budget(box.credential)
    if budget is None:
        return False
    used = cluster.in_use[box.credential].total() + _lacked(_before(cluster, attempt, box.credential))
    return used + at_once(attempt) > budget


def has_room(cluster: ClusterState, attempt: Attempt, box: Box) -> bool:
    """Return whether workers have free slots for a box without workers."""
    return cluster.free_capacity.room(box.opening)[0] >= at_once(attempt) + _lacked(_near(cluster, attempt, box))


def why_waits(cluster: ClusterState, attempt: Attempt, box: Box) -> str:
    """Return what the box waits for before it gets workers; "" if it has had them, or if no worker has a free slot."""
    if box.working:
        return ""
    count, budget = at_once(attempt), cluster.limits.slot_budget(box.credential)
    free, slots = cluster.free_capacity.room(box.opening)
    whose = box.credential if len(box.credential) <= NAME_MAX else "its token"
    boxes = count // attempt.num_workers
    waits = f"it waits for {count} slots at once" + (f", for {boxes} boxes" if boxes > 1 else "")
    if budget is not None and count > budget:
        return f"{waits}, and the budget of {whose} is {budget}. Lower num_workers_per_box, or raise --max-slots"
    if budget is not None and exceeded(cluster, attempt, box):
        jobs, before = cluster.in_use[box.credential], _before(cluster, attempt, box.credential)
        in_use = f"{jobs.total()} of {budget} slots are in use by {_listed(jobs)}"
        return f"it waits for the budget of {whose}: {in_use}{_kept(before)}"
    if 0 < slots < count:
        return f"{waits}, and all workers together have {slots}. Start more workers, or lower num_workers_per_box"
    if not free or has_room(cluster, attempt, box):
        return ""
    return f"{waits}: {free} are free{_kept(_near(cluster, attempt, box))}"


def _before(cluster: ClusterState, attempt: Attempt, credential: str) -> list[Attempt]:
    """Return attempts with this credential whose boxes come before the first one of `attempt`."""
    return [other for other in _lacking(cluster, attempt) if _any_box(other).credential == credential]


def _near(cluster: ClusterState, attempt: Attempt, box: Box) -> list[Attempt]:
    """Return attempts on the same workers whose boxes come before the first one of `attempt`."""
    share = cluster.free_capacity.share
    return [other for other in _lacking(cluster, attempt) if share(box.opening, _any_box(other).opening)]


def _lacking(cluster: ClusterState, attempt: Attempt) -> list[Attempt]:
    return [] if attempt.working else [other for other in cluster.lacking.values() if other.lacks]


def _any_box(attempt: Attempt) -> Box:
    return next(iter(attempt.boxes.values()))


def _lacked(attempts: Iterable[Attempt]) -> int:
    return sum(attempt.lacks for attempt in attempts)


def _kept(before: list[Attempt]) -> str:
    names = _listed(attempt.run for attempt in before)
    return f", and {_lacked(before)} are kept for other boxes of {names}" if before else ""


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    return ", ".join([*known[:_NAMES_SHOWN], *(["..."] if len(known) > _NAMES_SHOWN else [])])
