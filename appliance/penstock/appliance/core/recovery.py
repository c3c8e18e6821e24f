"""Recovery of the cluster state from the journal after a restart of the coordinator.

Every worker and client gets a full new lease. Workers are restored as not registered, and asked to register with their
next heartbeat; the same process (session id) keeps its slots, so no batch is lost or computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from penstock.appliance.core import opening
from penstock.appliance.core.attempts import LINGER_S
from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import (
    Attempt,
    AttemptState,
    Box,
    BoxPresence,
    ClosedAttempt,
    Run,
    Slot,
    Worker,
    client_in,
)
from penstock.appliance.journal.database import damaged
from penstock.appliance.journal.journal import SLOT_FIELDS
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import PenstockError
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


def restore(
    cluster: ClusterState, waiting: dict[SlotKey, Slot], now: float, worker_lease_s: float, client_lease_s: float
) -> None:
    """Fill an empty cluster state, and the slots that wait, from its journal. The leases are at least those that were
    promised before, or longer if peers must first find the coordinator on another host. Raises JournalError if rows
    contradict each other."""
    try:
        _fill(cluster, waiting, now, worker_lease_s, client_lease_s)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, DecodeError, PenstockError) as error:
        why = f"its rows contradict each other: {type(error).__name__}: {error}"
        raise damaged(cluster.journal.name, why) from error


def _fill(
    cluster: ClusterState, waiting: dict[SlotKey, Slot], now: float, worker_lease_s: float, client_lease_s: float
) -> None:
    journal = cluster.journal
    if journal.boots > 1:
        cluster.events.add("coordinator restarted", "the coordinator was started again on its journal")
    for row in journal.rows("runs"):
        seed = int(row["seed"])
        run = Run(row["run"], seed, row["num_boxes"], row["num_workers"], row["attempt"], row["generation"])
        cluster.runs[run.name] = run
    for row in journal.rows("mixture_changes"):
        changes = cluster.runs[row["run"]].mixture_changes
        changes.insert(row["number"], records_pb2.MixtureChange.FromString(row["change"]))
    for row in journal.rows("ends"):
        cluster.runs[row["run"]].end = pb.RunEnd.FromString(row["end"])
    for row in journal.rows("unused"):
        cluster.runs[row["run"]].unused = True
    for row in journal.rows("attempts"):
        run, number, state = cluster.runs[row["run"]], row["attempt"], AttemptState(row["state"])
        if state is AttemptState.OPEN:
            topology = (run.num_boxes, run.num_workers)
            run.current = Attempt(run.name, number, row["key"], row["opened_by"], *topology, run.seed, last_live=now)
            run.current.mixture_changes = run.mixture_changes
        else:
            run.past[number] = ClosedAttempt(number, row["key"], state, row["why"], {}, now)
    holders = {(row["run"], row["attempt"], row["box"]): row for row in journal.rows("holders")}
    for row in journal.rows("boxes"):
        run = cluster.runs[row["run"]]
        if run.current is not None and row["attempt"] == run.current.number:
            _box(cluster, run.current, row, holders.get((run.name, row["attempt"], row["box"])), now)
            cluster.live_boxes += row["place"] == BoxPresence.LIVE.value
        else:
            run.past[row["attempt"]].clients[row["box"]] = client_in(row["client_id"])
    for row in journal.rows("slots"):
        _slot(cluster, waiting, row, now)
    for row in journal.rows("skips"):
        slot = cluster.slot(SlotKey(row["run"], row["attempt"], row["box"], row["slot"]))
        assert slot is not None
        slot.skips[row["epoch"], row["total"]] = row["count"]
        slot.skipped[row["epoch"], row["total"]] = row["own"]
    for row in journal.rows("reserved"):
        slot = cluster.slot(SlotKey(row["run"], row["attempt"], row["box"], row["slot"]))
        if slot is not None:  # None: an older release, which does not know this table, ended the attempt
            slot.reserved = row["generation"]
            cluster.box_of(slot)[0].note_generation(slot.reserved)
    for row in journal.rows("abandoned"):
        attempt = cluster.runs[row["run"]].current
        # else an older release, which does not know this table, ended the attempt
        if attempt is not None and attempt.number == row["attempt"]:
            attempt.note_abandoned(attempt.boxes[row["box"]], row["epoch"], row["step"])
    for row in journal.rows("tracks"):
        attempt = cluster.runs[row["run"]].current
        if attempt is not None and attempt.number == row["attempt"]:
            box, track = attempt.boxes[row["box"]], pb.History.FromString(row["history"])
            box.earlier, box.settled = tuple(track.known), track.settled and box.presence is BoxPresence.CLOSED
    worker_lease_s = max(worker_lease_s, cluster.worker_lease_policy().lease_s)
    for worker in cluster.workers.values():
        worker.lease_until = now + worker_lease_s
    client_lease_s = max(client_lease_s, cluster.box_lease_policy().lease_s)
    for attempt in cluster.open_attempts():
        for box in attempt.boxes.values():
            box.lease_until = now + client_lease_s
    still_open = {(attempt.run, attempt.number) for attempt in cluster.open_attempts()}
    for run_name, number in cluster.snapshot_index.attempts() - still_open:
        cluster.snapshot_index.drop_attempt(run_name, number)


def _box(
    cluster: ClusterState, attempt: Attempt, row: Mapping[str, Any], holder: Mapping[str, Any] | None, now: float
) -> None:
    request = pb.OpenRunRequest.FromString(row["opening"])
    request.ClearField("client_id")  # older releases stored it
    start = opening.validate(request)
    box = Box(
        row["box"], client_in(row["client_id"]), request, start, BoxPresence(row["place"]), now, cluster.next_version()
    )
    box.reported_at, box.reported, box.restored = now, False, True
    box.history.append(start)
    if box.presence is BoxPresence.CLOSED:
        box.lingers_until = now + LINGER_S
    if request.HasField("restart"):  # snapshots from before it may still be on disk
        box.history.append(Position.from_proto(box.launch_start))
        for slot in range(attempt.num_workers):
            cluster.snapshot_index.drop_beyond(SlotKey(attempt.run, attempt.number, box.number, slot), -1)
    attempt.add_box(box)
    if holder is not None:
        box.credential = holder["credential"]
        cluster.set_working(attempt, box, working=bool(holder["working"]))
    cluster.slots_held[box.credential] += attempt.num_workers


def _slot(cluster: ClusterState, waiting: dict[SlotKey, Slot], row: Mapping[str, Any], now: float) -> None:
    attempt = cluster.runs[row["run"]].current
    assert attempt is not None  # rows of slots go with their attempt, in one transaction
    box = attempt.boxes[row["box"]]
    key = SlotKey(row["run"], row["attempt"], row["box"], row["slot"])
    slot = Slot(key, **{name: row[name] for name in SLOT_FIELDS}, moved_at=now)
    if row["capabilities"] is not None:
        slot.capabilities = records_pb2.LoaderCapabilities.FromString(row["capabilities"])
    if row["error"] is not None:
        slot.error = records_pb2.ErrorDetail.FromString(row["error"])
    box.slots.append(slot)
    attempt.note_generation(slot.generation)
    if slot.worker:
        worker = cluster.workers.get(slot.worker)
        if worker is None:
            worker = Worker(slot.worker, slot.session, "", 0, "", "", False, now, now, cluster.next_version())
            cluster.workers[worker.name] = worker
        worker.slots[slot.key] = box.assignment_size
        cluster.placed += 1
        cluster.set_working(attempt, box, working=True)  # an older release may have placed it
    elif slot.phase == pb.WAITING and box.presence is BoxPresence.LIVE:
        waiting[slot.key] = slot
