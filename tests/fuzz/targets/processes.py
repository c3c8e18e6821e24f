"""Decoders of what processes say that are no lanes: control messages and progress pages of children that run user code,
calls to the coordinator, rows of its journal."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from typing import Any

from fake_cluster import FakeCluster, limited
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from targets.target import Target, pieces, script, words

from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.recovery import restore
from penstock.appliance.journal.journal import TABLES, Journal
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.appliance.journal.snapshot_index import SnapshotIndex as Snapshots
from penstock.appliance.limits import Limits
from penstock.proto.errors import PenstockError, ProtocolError
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.control_channel import (
    MAX_PAYLOAD,
    SEALS,
    ControlMessage,
    LargeMessage,
    counts,
    decoded,
    packed,
)
from penstock.worker.processes.progress_page import ProgressPage

__all__ = ["TARGETS"]


# ---- children


def _control(data: bytes) -> None:
    """Packets. Steps: 0 as it is, 1 a message's text, and 64 bytes of payload; above that in sealed memory."""
    for what, piece in pieces(data):
        text, payload = (piece[:-64], piece[-64:]) if what % 2 else (b"", piece)
        packet = payload if not what % 2 else struct.pack("<I", len(text)) + text + payload
        if what % 4 < 2:
            message = decoded(packet, [])
        else:
            memory = os.memfd_create("message", os.MFD_ALLOW_SEALING)
            os.write(memory, packet)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            text, payload = LargeMessage([memory]).read(MAX_PAYLOAD)
            message = decoded(text, [], payload)
        assert type(message.kind) is str
        counts(message, *list(message.fields)[:4])


def _control_seeds() -> list[bytes]:
    messages = [
        ControlMessage("point", {"epoch": 0, "total": 3}, b"state"),
        ControlMessage("ready", {}, b"\10\4"),
        ControlMessage("begun"),
    ]
    packets = [b"".join(packed(message)[0]) for message in messages]
    text = packed(messages[0])[0][0][4:]
    return [script(*((0, packet) for packet in packets)), script((2, packets[0])), script((1, text + bytes(64)))]


def _progress_page(data: bytes) -> None:
    """User code has written here and there in the progress page; the daemon reads it. First the head, then wherever."""
    progress_page = ProgressPage.create()
    size = os.fstat(progress_page.fd).st_size
    try:
        for at, piece in pieces(data):
            start = at * 97 * 8 % size
            os.pwrite(progress_page.fd, piece[: size - start], start)
        progress_page.refresh()
        progress_page.ends()
        name, seconds = progress_page.activity
        f"{name} {seconds:.1f}"
        for total in (0, 1, progress_page.total, progress_page.delivered, (1 << 64) - 1):
            entry = progress_page.entry(total)
            assert entry is None or entry.total == total
        pb.SlotReport(produced=progress_page.total, delivered=progress_page.delivered)
    finally:
        progress_page.close()


def _progress_page_seeds() -> list[bytes]:
    progress_page = ProgressPage.create()
    progress_page.set_position(10, 1, 40)
    progress_page.record(11, 1, 5, 44, 9)
    progress_page.end(1, 11)
    progress_page.doing("next", 11)
    head = os.pread(progress_page.fd, 64, 0)
    progress_page.close()
    return [script((0, head)), script((0, head), (7, head))]


# ---- the coordinator


def _calls(world: FakeCluster) -> list[tuple[type[Protobuf], Callable[[Any], object]]]:
    state_machine = world.state_machine

    def fetch(request: pb.FetchStateRequest) -> None:
        state_machine.state_queries.end(state_machine.begin_state(request))

    def ask(request: pb.FetchStateRequest) -> None:
        state_machine.begin_state(request)  # and its asker waits

    def put(header: pb.SnapshotHeader) -> None:
        state_machine.slot_of_generation(
            SlotKey(header.run, header.attempt, header.box, header.slot), header.generation
        )
        state_machine.snapshot_stored(header)

    return [
        (pb.OpenRunRequest, state_machine.attempts.open_run),
        (pb.WatchRunRequest, world.watch),
        (pb.CloseRunRequest, state_machine.attempts.close_run),
        (pb.RegisterWorkerRequest, state_machine.workers.register_worker),
        (pb.HeartbeatRequest, world.heartbeat),
        (pb.DeregisterWorkerRequest, state_machine.workers.deregister_worker),
        (pb.FetchStateRequest, fetch),
        (pb.FetchStateRequest, ask),
        (pb.StateAnswer, lambda answer: state_machine.answer_state(answer, b"state")),
        (pb.SnapshotHeader, put),
    ]


@limited(slots_max=256)
def _coordinator(data: bytes) -> None:
    """Calls in any order with any fields, beside an honest worker and an honest box, who must not suffer. Steps: the
    call's number, its message; above that, seconds that epoch."""
    world = FakeCluster()
    worker, box = world.worker("honest", slots=2), world.open()
    worker.ready()
    calls = _calls(world)
    refused = 0
    for what, piece in pieces(data, 24):
        if what % 12 >= len(calls):
            world.run_for(1 + what % 12 - len(calls), [worker, box])
            continue
        kind, call = calls[what % 12]
        try:
            call(kind.FromString(piece))
        except DecodeError:
            pass  # gRPC answers these itself
        except PenstockError:
            refused += 1
    world.run_for(0.5)
    world.status()
    other = world.worker("other", slots=4)
    other.heartbeat()
    fresh = world.open(job="fresh", client_id="fresh")
    fresh.deliver(3)
    if refused:
        raise ProtocolError(f"{refused} calls were refused")


def _coordinator_seeds() -> list[bytes]:
    """Calls that could be the honest ones' own: the worst there are."""
    position = Position(3, 0, [0, 1], 1, [2, 1], [2, 1]).to_proto()
    watch = pb.WatchRunRequest(run="job/0", attempt=1, box=0, client_id="client-0", delivered=position, hold_s=1.0)
    watch.abandoned.add(epoch=0, step=3)
    fetch = pb.FetchStateRequest(run="job/0", attempt=1, step=3, deadline_s=1.0)
    fetch.progress.CopyFrom(watch)
    opening = pb.OpenRunRequest(job="mine", client_id="c", num_boxes=1, num_workers_per_box=2, start=position)
    opening.loader.input_fn = "m:f"
    report = pb.SlotReport(run="job/0", attempt=1, generation=1, phase=pb.READY, batches_per_s=1.5)
    beat = pb.HeartbeatRequest(worker="honest", session="honest-1", slots=[report], hold_s=1.0)
    answer = pb.StateAnswer(
        request="job/0@1/0.0#1:3:0.2.2:0", worker="honest", ends=[records_pb2.EpochEnd(epoch=0, total=1)]
    )
    answer.ended, answer.ended_total = True, 1
    register = pb.RegisterWorkerRequest(worker="mine", session="s", slots=2, local_address="l", tcp_address="t:1")
    header = pb.SnapshotHeader(run="job/0", attempt=1, generation=1, total=2, size=5)
    close = pb.CloseRunRequest(run="mine/0", attempt=1, client_id="c")
    named: list[tuple[int, Protobuf]] = [(1, watch), (4, beat), (7, fetch), (8, answer), (0, opening), (3, register)]
    named += [(9, header), (6, fetch), (5, pb.DeregisterWorkerRequest(worker="mine", session="s")), (2, close)]
    return [
        script(*((what, message.SerializeToString()) for what, message in named), (11, b"")),
        script((1, watch.SerializeToString())),
    ]


def _rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of a coordinator with a run of two slots."""
    world = FakeCluster()
    world.worker("w")
    world.open()
    return {table: [dict(row) for row in world.journal.rows(table)] for table in TABLES}


class _Journal(Journal):
    """A journal that says what its test wants."""

    def __init__(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__(None)
        self._said = rows

    def rows(self, table: str) -> list[Any]:
        return self._said[table]


_whole: dict[str, list[dict[str, Any]]] = {}


def _journal(data: bytes) -> None:
    """A journal of which SQLite finds nothing wrong, with some values changed: what else than files rot."""
    if not _whole:
        _whole.update(_rows())
    rows = {table: [dict(row) for row in found] for table, found in _whole.items()}
    for what, piece in pieces(data, 4):
        table = list(rows)[what % len(rows)]
        if not rows[table]:
            continue
        number, form, value = piece[0] if piece else 0, piece[1] if len(piece) > 1 else 0, piece[2:]
        row = rows[table][number // 16 % len(rows[table])]
        column = list(row)[number % len(row)]
        changed: Any = (None, value, value.decode("latin-1"), *words(value)[:1], 0)[form % 4]
        row[column] = changed
        if form & 128:
            rows[table].remove(row)
    journal = _Journal(rows)
    try:
        zero = float  # a clock that stands still
        cluster = ClusterState(journal, Snapshots(Limits().budget), Limits(), lambda topic: None, zero, zero)
        restore(cluster, {}, 0.0, 3.0, 10.0)
    finally:
        journal.close()


def _journal_seeds() -> list[bytes]:
    return [b"", script((3, b"\3\0"))]


TARGETS = [
    Target("control", _control, _control_seeds),
    Target("progress page", _progress_page, _progress_page_seeds),
    Target("coordinator", _coordinator, _coordinator_seeds, most_bytes=64 << 20, examples=100),
    Target("journal", _journal, _journal_seeds, examples=100),
]
