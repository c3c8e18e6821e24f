"""Interfaces between a slot, its daemon and its parts, and the types that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, JournalError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.helpers.replayers import DEADLINE_S, ReplayHost
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.resources.turn_queue import TurnQueue
from penstock.worker.slots.snapshots import SlotSnapshots

__all__ = ["COORDINATOR_ERRORS", "DaemonCounters", "SlotContext", "SlotHost", "SlotKey", "SnapshotQuota", "key_of"]

SlotKey = tuple[str, int, int, int, int]
"""Key of one generation of a slot: (run, attempt, box, slot, generation). `attempt` is the number of the job's launch.
`generation` is a number that rises each time the slot moves to another runner."""
COORDINATOR_ERRORS = (CoordinatorUnavailableError, DeadlineError, JournalError)
"""Temporary errors whose cause is the coordinator: unreachable, slow, or unable to write its journal (full disk). A
call that fails with one of them is tried again."""


def key_of(assignment: records_pb2.WorkerAssignment | coordinator_pb2.TakenSlot) -> SlotKey:
    """Return the key of one generation of a slot: (run, attempt, box, slot, generation)."""
    a = assignment
    return a.run, a.attempt, a.box, a.slot, a.generation


@dataclass
class DaemonCounters:
    """Counters of a daemon, summed over all its present and former slots."""

    snapshots: int = 0
    """Number of snapshots and epoch starts received from runners."""
    snapshots_sent: int = 0
    """Number of snapshots that the coordinator has made durable."""
    snapshots_refused: int = 0
    """Number of snapshots that the coordinator has refused, for example because its budget is used up."""
    snapshot_sent_bytes: int = 0
    """Total size of the snapshots that were made durable, in bytes."""
    recoveries: int = 0
    """Number of slots that this worker started in order to continue the work of another runner."""
    losses: int = 0
    """Number of slots on this worker that were reported lost, so that another runner continues them."""


@dataclass(frozen=True)
class SnapshotQuota:
    """Limit on the snapshots that a slot may send to the coordinator, which sets it.

    every_s: smallest number of seconds between two snapshots. bytes_per_s: largest number of bytes per second.
    """

    every_s: float
    bytes_per_s: float

    def pause_s(self, size: int) -> float:
        """Return the seconds to wait after a snapshot of `size` bytes before the next one is sent."""
        return max(self.every_s, size / self.bytes_per_s)


class SlotHost(ReplayHost, Protocol):
    """Part of its daemon that a slot needs."""

    name: str
    coordinator: AsyncCoordinatorClient
    runner_memory: int
    """Largest number of bytes that a runner and its descendants may hold; 0 = no limit."""
    snapshot_quota: SnapshotQuota
    counters: DaemonCounters
    starts: TurnQueue
    embedded: bool
    """True if the daemon is a child of the training job (embedded mode)."""

    def slot_changed(self) -> None: ...


class SlotContext(Protocol):
    """Interface of a slot for its parts: durable_snapshots.py, memory_watch.py and slot_states.py."""

    name: str
    log: SubjectLogger
    assignment: records_pb2.WorkerAssignment
    phase: coordinator_pb2.SlotPhase.ValueType
    lost: bool
    capabilities: records_pb2.LoaderCapabilities
    progress_page: ProgressPage
    store: SlotSnapshots
    abandoned: dict[int, int]
    """Epochs that the training loop abandoned, as the runner reported: number of the epoch -> number of the slot's last
    batch in it, counted over all epochs."""
    from_before: set[tuple[int, int, int, bool, int]]
    """Positions (`StoredSnapshot.position`) of the restart points that earlier runners of the slot made."""
    unsaved: records_pb2.ErrorDetail | None
    broken: records_pb2.ErrorDetail | None
    """Error with which the input has failed. The runner still serves the batches before it."""
    ready: asyncio.Event
    begun: asyncio.Event
    attached: bool
    recycle: bool
    """True if the slot's runner is replaced because it held too much memory."""
    outgrown: bool
    """True if the runner held too much memory before its second batch."""

    @property
    def host(self) -> SlotHost: ...
    @property
    def is_savable(self) -> bool: ...
    @property
    def runner_gone(self) -> bool: ...

    def step_of(self, total: int) -> int:
        """Return the training step in which the box (data-parallel rank) got the slot's batch `total`, provided that
        all slots of the box still had batches in the epoch."""

    def fail(self, error: records_pb2.ErrorDetail, *, lost: bool) -> None:
        """End the slot with an error. lost: True if another worker is to continue the slot; False if the training job
        is to get the error."""

    def lose(self, how: str, stack: str = "") -> None:
        """Report the runner lost, so that another runner continues the slot.

        how: how the runner ended, as the end of a sentence whose subject is "the runner". stack: the runner's stack
        when it crashed.
        """

    def drain(self) -> None:
        """Process all messages that the runner has sent so far."""

    async def helper(
        self, points: list[bytes], task: str, deadline_s: float = DEADLINE_S, **fields: Any
    ) -> ControlMessage:
        """Run a task with the slot's loader in a helper process, and return the answer; see run_task (replayers.py)."""

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run `work` as a task that is cancelled when the slot ends."""
