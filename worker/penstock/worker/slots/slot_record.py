"""What the daemon knows of a slot, and what a slot uses of its daemon. The parts of a slot share both."""

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
"""Key of one generation of a slot: (run, attempt, box, slot, generation). `attempt` is the number of the job's launch.
`generation` is a number that rises each time the slot moves to another runner."""
COORDINATOR_ERRORS = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""Temporary errors whose cause is the coordinator: unreachable, slow, or unable to write its journal (full disk). A
call that fails with one of them is tried again."""


def key_of(assignment: records_pb2.WorkerAssignment | coordinator_pb2.TakenSlot) -> SlotKey:
    a = assignment
    return a.run, a.attempt, a.box, a.slot, a.generation


@dataclass
class DaemonCounters:
    """Counters of a daemon, summed over all its present and former slots."""

    snapshots: int = 0
    """Number of snapshots and epoch starts received from runners."""
    snapshots_sent: int = 0
    snapshots_refused: int = 0
    """Number of snapshots that the coordinator has refused, for example because its budget is used up."""
    snapshot_sent_bytes: int = 0
    recoveries: int = 0
    """Number of slots that this worker started in order to continue the work of another runner."""
    losses: int = 0


@dataclass
class SnapshotQuota:
    """Limit on the snapshots that a slot may send to the coordinator, which sets it.

    every_s: smallest number of seconds between two snapshots. bytes_per_s: largest number of bytes per second.
    """

    every_s: float
    bytes_per_s: float

    def pause_s(self, size: int) -> float:
        """Return the seconds to wait after a snapshot of `size` bytes before the next one is sent."""
        return max(self.every_s, size / self.bytes_per_s)


@dataclass(frozen=True)
class SlotHost:
    """What a slot uses of its daemon."""

    name: str
    coordinator: AsyncCoordinatorClient
    blobs: Blobs
    fork_server: KeptForkServer
    starts: TurnQueue
    helper_turns: TurnQueue
    """Queue of tasks for helper processes."""
    snapshot_quota: SnapshotQuota
    counters: DaemonCounters
    slot_changed: Callable[[], None]
    """Called when the report of a slot has changed."""
    runner_memory: int = 0
    """Largest number of bytes that a runner and its descendants may hold; 0 = no limit."""
    embedded: bool = False
    """True if the daemon is a child of the training job (embedded mode)."""


@dataclass(eq=False)
class SlotRecord:
    """What the daemon knows of one generation of a slot."""

    assignment: records_pb2.WorkerAssignment
    name: str
    log: SubjectLogger
    progress_page: ProgressPage
    store: SlotSnapshots = field(default_factory=SlotSnapshots)
    child: Child | None = None
    phase: coordinator_pb2.SlotPhase.ValueType = coordinator_pb2.STARTING
    error: records_pb2.ErrorDetail | None = None
    lost: bool = False
    """True if another worker is to continue the slot, which has ended here."""
    capabilities: records_pb2.LoaderCapabilities = field(
        default_factory=lambda: records_pb2.LoaderCapabilities(length=-1)
    )
    abandoned: dict[int, int] = field(default_factory=dict)
    """Epochs that the training loop abandoned, as the runner reported: number of the epoch -> number of the slot's last
    batch in it, counted over all epochs."""
    from_before: set[tuple[int, int, int, bool, int]] = field(default_factory=set)
    """Positions (`StoredSnapshot.position`) of the restart points that earlier runners of the slot made."""
    unsaved: records_pb2.ErrorDetail | None = None
    """Error because of which no snapshot of the loader is taken."""
    broken: records_pb2.ErrorDetail | None = None
    """Error with which the input has failed. The runner still serves the batches before it."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    attached: bool = False
    """True once a training job's connection was passed to the runner."""
    recycle: bool = False
    """True if the slot's runner is replaced because it held too much memory."""
    outgrown: bool = False
    """True if the runner held too much memory before its second batch."""

    @property
    def is_savable(self) -> bool:
        """True if a second instance of the slot's loader may be made and replayed: the loader has state methods, or
        `replay=True` was given. A second instance of any other loader may take data from the stream, for example from a
        queue."""
        return self.capabilities.state_methods > 0 or self.assignment.loader.options.replay_without_state

    @property
    def runner_gone(self) -> bool:
        return self.child is not None and self.child.exited.done()

    def drain(self) -> None:
        if self.child is not None:
            self.child.drain()
