"""Small faults of the coordinator's own code, put in on purpose: a simulation that does not see them sees nothing.

Each is a replacement in the source of one function. If the source has changed so that the text is not there, `applied`
says so: then the mutation is to be written anew, for the mistake that it stands for can still be made.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.appliance.core import box_progress, opening, recovery
from penstock.appliance.core.attempts import Attempts
from penstock.appliance.core.migration import Migrations
from penstock.appliance.core.mixture_orders import MixtureOrders
from penstock.appliance.core.placement import Placement
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.core.state_query import StateQuery
from penstock.appliance.core.workers import Workers
from penstock.appliance.journal.journal import GroupCommit
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.appliance.server.service import Service

__all__ = ["MUTATIONS", "Mutation", "applied"]


@dataclass(frozen=True)
class Mutation:
    name: str
    where: type | ModuleType
    function: str
    old: str
    new: str
    seed: int = 0
    """History that has seen it, which is tried first."""


MUTATIONS = (
    Mutation(
        "a move does not raise the generation", Placement, "move", "slot.generation = slot.next_generation", "pass"
    ),
    Mutation("a slot that was moved is forgotten", Placement, "move", "self.enqueue(slot)", "pass"),
    Mutation(
        "room in a budget or at a worker is overlooked", Placement, "place_waiting", "room != self._room", "False"
    ),
    Mutation("a slot is given out twice", Placement, "_place", "del self.waiting[slot.key]", "pass"),
    Mutation("a slot is given out and not written down", Placement, "_place", "self._cluster.save_slot(slot)", "pass"),
    Mutation(
        "a box that counts in a budget is not written down",
        Placement,
        "place_waiting",
        "self._cluster.save_holder(attempt, box)",
        "pass",
    ),
    Mutation(
        "a box that gave its workers back counts on",
        Attempts,
        "_vacate",
        "cluster.set_working(attempt, box, working=False)",
        "pass",
    ),
    Mutation(
        "a superseded attempt is not ended", Attempts, "_next_attempt", "if run.current is not None:", "if False:"
    ),
    Mutation("the reply goes before the commit", GroupCommit, "sync", "await written", "pass"),
    Mutation(
        "rows that could not be written are forgotten",
        GroupCommit,
        "_write",
        "self._journal.put_back(rows)",
        "pass",
        seed=12,
    ),
    Mutation(
        "a late report of an old generation counts",
        Workers,
        "_note_report",
        "slot.generation != report.generation or ",
        "",
        seed=8,
    ),
    Mutation(
        "a heartbeat does not renew the lease",
        Workers,
        "report_worker",
        "worker.reported_at = now",
        "return",
    ),
    Mutation(
        "a watch does not renew the lease",
        Attempts,
        "_renew",
        "box.lease_until = now + self._cluster.box_lease_policy().promised(known_s, LEASE_MAX_S)\n"
        "    box.reported_at, box.hung_up = now, False",
        "pass",
    ),
    Mutation("leases are not whole after a restart", recovery, "_fill", "now + worker_lease_s", "now + 0.5", seed=2),
    Mutation(
        "what it slept through is others' silence", StateMachine, "_extend_leases", "if late > 0:", "if False:", seed=5
    ),
    Mutation("the newest snapshot goes, not the oldest", SnapshotIndex, "trim", "kept[first:]", "kept[:first]"),
    Mutation(
        "the window of states is not kept",
        box_progress,
        "advance",
        "history[0].total[slot.key.slot]",
        "position.total[slot.key.slot]",
    ),
    Mutation(
        "a snapshot is acknowledged before it is written",
        Service,
        "PutSnapshot",
        "await self._disk.put_snapshot(header, data)",
        "pass",
    ),
    Mutation(
        "a state keeps answers to an older plan",
        StateQuery,
        "_refresh",
        "have.slot_request.place == place",
        "True",
    ),
    Mutation(
        "a successor takes over before it is ready",
        Migrations,
        "target_reported",
        "report.phase == pb.READY",
        "True",
        seed=10,
    ),
    Mutation(
        "a successor keeps its place when it is dismissed",
        Placement,
        "cancel_migration",
        "worker.slots.pop(slot.key, None)",
        "pass",
        seed=17,
    ),
    Mutation(
        "a successor's generation is not written down",
        Placement,
        "start_migration",
        "self._cluster.journal.put(",
        "dict(",
        seed=6,
    ),
    Mutation(
        "a new launch waits for the old one's lease",
        opening,
        "decide",
        "if key and key != current.key:",
        "if False:",
        seed=21,
    ),
    Mutation("what was dropped stays counted", SnapshotIndex, "_drop", "self.used -= old.size", "pass"),
    Mutation(
        "two changes of the mixture are decided at once",
        MixtureOrders,
        "_attempt",
        "if attempt.fence is not None and not own:",
        "if False:",
        seed=8,
    ),
    Mutation(
        "a change of the mixture restarts no slot",
        MixtureOrders,
        "make",
        "self._placement.move(slot, note, None)",
        "pass",
        seed=6,
    ),
    Mutation(
        "a box's step is not compared with a change's",
        MixtureOrders,
        "undecided",
        "if taken >= change.step:",
        "if False:",
        seed=53,
    ),
    Mutation(
        "a change of the mixture does not wait for boxes",
        MixtureOrders,
        "undecided",
        "if missing:",
        "if False:",
        seed=6,
    ),
    Mutation(
        "a change of the mixture is not written down",
        MixtureOrders,
        "make",
        "cluster.journal.put(",
        "dict.fromkeys(",
        seed=6,
    ),
    Mutation(
        "a worker that registers again loses its slots",
        Workers,
        "register_worker",
        "old is not None and old.session == request.session",
        "False",
        seed=4,
    ),
    Mutation(
        "a restarted coordinator forgets who waits", recovery, "_slot", "waiting[slot.key] = slot", "pass", seed=12
    ),
)


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The code with the mutation in it. AssertionError if its text is not there, or not once."""
    where = mutation.where
    original: Any = getattr(where, mutation.function)
    source = textwrap.dedent(inspect.getsource(original))
    found = source.count(mutation.old)
    assert found == 1, f"{mutation.name}: {mutation.old!r} stands {found} times in {original.__qualname__}"
    module = where if isinstance(where, ModuleType) else sys.modules[where.__module__]
    namespace: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(mutation.old, mutation.new)
    exec(compile(code, f"<{mutation.name}>", "exec"), vars(module), namespace)
    setattr(where, mutation.function, namespace[mutation.function])
    try:
        yield
    finally:
        setattr(where, mutation.function, original)
