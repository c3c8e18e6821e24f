"""What the daemon knows of a slot, and what a slot uses of its daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, JournalError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.fork_servers import KeptForkServer
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.turn_queue import TurnQueue
from penstock.worker.slots.blobs import Blobs
from penstock.worker.slots.snapshots import SlotSnapshots

SlotKey = tuple[str, int, int, int, int]
"""(run, attempt, box, slot, generation): the job's launch, and a number that rises with each new runner."""
COORDINATOR_ERRORS = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""Temporary errors of an unreachable or slow coordinator, or one with a full disk. The call is tried again."""


def key_of(assignment: records_pb2.WorkerAssignment | coordinator_pb2.TakenSlot) -> SlotKey:
    a = assignment
    return a.run, a.attempt, a.box, a.slot, a.generation


@dataclass
class DaemonCounters:
    """Counters of a daemon, each shown as the metric penstock_worker_NAME_total."""

    snapshots: int = 0
    """Snapshots and epoch starts received from runners."""
    snapshots_sent: int = 0
    snapshots_refused: int = 0
    """Snapshots that the coordinator refused, for example for its budget."""
    snapshot_sent_bytes: int = 0
    recoveries: int = 0
    """Slots started here to continue another runner's work."""
    losses: int = 0


@dataclass
class SnapshotQuota:
    """The coordinator's limit on a slot's snapshots: least seconds between two, and bytes per second."""

    every_s: float
    bytes_per_s: float

    def pause_s(self, size: int) -> float:
        return max(self.every_s, size / self.bytes_per_s)


@dataclass(frozen=True)
class SlotHost:
    name: str
    coordinator: AsyncCoordinatorClient
    blobs: Blobs
    fork_server: KeptForkServer
    starts: TurnQueue
    helper_turns: TurnQueue
    snapshot_quota: SnapshotQuota
    counters: DaemonCounters
    slot_changed: Callable[[], None]
    runner_memory: int = 0
    """Bytes that a runner and its descendants may hold; 0 = no limit."""
    embedded: bool = False
    slot_bytes: int = 1 << 30
    """Bytes that the daemon may hold of what one slot's runner sends: half of it snapshots, a quarter a message."""


@dataclass(eq=False)
class SlotRecord:
    assignment: records_pb2.WorkerAssignment
    name: str
    log: SubjectLogger
    progress_page: ProgressPage
    store: SlotSnapshots = field(default_factory=SlotSnapshots)
    child: Child | None = None
    phase: coordinator_pb2.SlotPhase.ValueType = coordinator_pb2.STARTING
    error: records_pb2.ErrorDetail | None = None
    lost: bool = False
    """True if another worker is to continue the slot, ended here."""
    capabilities: records_pb2.LoaderCapabilities = field(
        default_factory=lambda: records_pb2.LoaderCapabilities(length=-1)
    )
    abandoned: dict[int, int] = field(default_factory=dict)
    """Epoch -> the slot's last batch, for those that the loop abandoned last."""
    from_before: set[tuple[int, int, int, bool, int]] = field(default_factory=set)
    """Positions (`StoredSnapshot.position`) of points that earlier runners made."""
    unsaved: records_pb2.ErrorDetail | None = None
    """Error because of which no snapshot is taken."""
    broken: records_pb2.ErrorDetail | None = None
    """Error of the input. The runner still serves the batches before it."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    attached: bool = False
    recycle: bool = False
    """True if the runner is replaced because it held too much memory."""
    outgrown: bool = False
    """True if it held too much memory before its second batch."""

    @property
    def is_savable(self) -> bool:
        """True if a second loader may be made and replayed: with state methods or `replay=True`. Any other may take
        data from the stream, such as from a queue."""
        return self.capabilities.state_methods > 0 or self.assignment.loader.options.replay_without_state

    @property
    def runner_gone(self) -> bool:
        return self.child is not None and self.child.exited.done()

    async def drain(self) -> None:
        if self.child is not None:
            await self.child.drain()
