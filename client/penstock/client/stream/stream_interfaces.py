"""Interfaces of an open run and of its reader, which returns the run's batches. There are two implementations of each.
In the first, batches come from worker processes over lanes (open_run.py, ordered_reader.py). In the second, batches are
made in this process (penstock.client.in_process). The module also contains what both share: progress, statistics,
messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol

from penstock.client.states.delivered_counts import DeliveredCounts
from penstock.client.states.epoch_starts import EpochStarts
from penstock.client.states.saved_state import BoxStart
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import PenstockError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.assignment import WORKER_INFO_TEXTS
from penstock.proto.state.counts import SampleCounts
from penstock.proto.state.position import Position
from penstock.proto.tracebacks import warn_user
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = [
    "EPOCH_ENDED",
    "BoxProgress",
    "Reader",
    "StepFence",
    "StreamRun",
    "StreamStats",
    "placed",
    "recovered",
    "tell_worker_info",
    "warn_of_whole_input",
]

_log = logging.getLogger("penstock.client")

EPOCH_ENDED: Final = object()
"""Result of `Reader.next` at the end of an epoch, instead of a batch."""
NEVER: Final = 1 << 63
"""Step number that no box ever comes to: the value of StepFence.step if there is no fence."""


@dataclass
class BoxProgress:
    """Progress of a box (a data-parallel rank). The training thread writes it, and another thread reports it to the
    coordinator. Values are replaced as a whole, so that the other thread reads whole values; only the numbers in
    `waited_by_slot` are increased in place."""

    position: Callable[[], records_pb2.BoxPosition | None] = lambda: None
    waiting_for: int = 0
    """1 + number of the slot for whose batch the loop waits; 0 if it does not wait."""
    waiting_since: float = 0.0
    """Start of the present wait, a time of time.monotonic()."""
    waited_by_slot: list[float] = field(default_factory=list)
    """Seconds for which the loop has waited for each slot's batches. Assign a new list to start again from 0."""
    epoch_ended: bool = False
    unreachable: Callable[[], list[tuple[int, int, str]]] = list
    """Function that returns (slot, generation, reason) for each slot on a worker that this host cannot reach."""
    counts: DeliveredCounts | None = None
    """Counts of the delivered samples, by source and key; None before the run has a reader."""
    abandoned: tuple[tuple[int, int], ...] = field(default=())
    """Pairs (epoch, last step) of the epochs that were abandoned."""
    epoch_starts: EpochStarts = field(default_factory=EpochStarts)
    _reported_waits: tuple[list[float], list[float]] = field(default=([], []))

    def waits(self) -> list[float]:
        """Return the seconds for which the loop has waited for each slot's batches so far, including the present wait.

        A value never decreases between calls, even if the training thread has just ended a wait and not yet added it to
        the list.
        """
        counted = self.waited_by_slot
        seconds, slot = list(counted), self.waiting_for - 1
        if 0 <= slot < len(seconds):
            seconds[slot] += max(0.0, time.monotonic() - self.waiting_since)
        of, before = self._reported_waits
        if of is counted:
            seconds = [max(pair) for pair in zip(before, seconds, strict=True)]
        self._reported_waits = (counted, seconds)
        return seconds


class StepFence:
    """Fence of a box: the step that the box must not take while the coordinator decides whether a mixture of sources
    changes from this step on. Without a fence `step` is NEVER.

    The training thread writes `taken` before it reads `step`. The watch thread writes `step` before it reads `taken`.
    So one of the two always sees what the other has written. Once the box has reported that it has not taken the step,
    it does not take it until the fence is removed.
    """

    __slots__ = ("answer", "step", "taken")

    def __init__(self) -> None:
        self.step = NEVER
        self.taken = 0
        """Last step that the training thread has taken, or is taking now."""
        self.answer = ("", 0)
        """Key by which the coordinator names the newest fence, and the value of `taken` when the fence was set."""

    def set(self, key: str, step: int) -> None:
        """Set the fence: the training thread waits before it takes `step`. `key`: the coordinator's name of this
        fence."""
        self.step = step
        if self.answer[0] != key:
            self.answer = (key, self.taken)

    def clear(self) -> None:
        """Remove the fence: the training thread may take further steps."""
        self.step = NEVER


@dataclass
class StreamStats:
    """Statistics of a loader's stream since its first loop began or a state was loaded."""

    steps: int = 0
    """Number of batches delivered to the loop."""
    waited_s: float = 0.0
    """Seconds for which the loop waited for batches."""
    waited_by_worker: dict[str, float] = field(default_factory=dict)
    """Seconds for which the loop waited for batches, by the name of the worker that made them."""
    copies: int = 0
    """Number of batches delivered as copies and not as views of the ring, because the loop held views of too many
    batches."""
    ahead: int = 0
    """Number of batches whose copy to the device was started before the loop requested them; 0 without a device."""
    recoveries: int = 0
    """Number of times that a slot has moved to another runner, after a fault or as planned."""
    corrupt: int = 0
    """Number of times that data arrived damaged, over the network or from memory, and were fetched again."""
    skipped: int = 0
    """Number of poison batches (batches that kill their runner) of this box left out in the present attempt
    (poison="skip")."""
    sources: dict[str, SampleCounts] = field(default_factory=dict)
    """Counts of the delivered samples by source, over the whole life of the run; empty unless the loader has `counts`
    (penstock.data.Counts). Other boxes have counts of their own. After a resume on another number of boxes, box 0
    continues the counts of all boxes, so the sum over all boxes is always that of the run."""
    keys: dict[str, SampleCounts] = field(default_factory=dict)
    """Counts of the delivered samples as in `sources`, but by key; empty unless the loader counts by a key
    (penstock.data.Counts(by=))."""
    imbalance: float | None = None
    """Imbalance of the boxes: cost of the most expensive box in a step, divided by the mean cost of all boxes, as the
    mean over this box's delivered steps. 1: all boxes cost the same. None unless the loader has `counts` and `balance`
    (penstock.data.Balance)."""


class StreamRun(Protocol):
    """Interface of an open run of one box (data-parallel rank)."""

    name: str
    box: int
    num_slots: int
    attempt: int
    seed: int
    cover: DigestCover
    error: PenstockError | None
    """Error that has ended the run; None while the run is open, and after a close without an error."""
    views: list[pb.SlotView]
    progress: BoxProgress
    ended_boxes: dict[int, int]
    """Boxes of the run that have ended an epoch and not begun the next one: the epoch's last step, by the number of the
    box."""
    box_apart: pb.BoxEnd | None
    """A box that is in another epoch than this one; None: no box is."""
    abandoned: bool
    """True once the loader was garbage-collected. The loader's finalizer sets it."""
    away_since: float | None

    @property
    def closed(self) -> bool: ...

    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        """Wait until `ready(self)` is True, and return True. Return False after `timeout_s` seconds, or if the run is
        closed. Raises the error that has ended the run."""

    def report(self) -> None:
        """Report this box's progress to the coordinator now."""

    def fail(self, error: PenstockError) -> None:
        """End the run with an error, which the training loop will get. May be called from any thread."""

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        """Return the positions of all boxes, and the WorkerRecords (counts and loader state) of all workers, at a step.
        Raises an error if they are not available within `deadline_s` seconds."""

    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        """Run the loader's aggregate_state_dict. `states`: envelope (encoded bytes) with the list of the workers'
        states. Return an envelope with the result."""

    def offer(self, starts: Callable[[], list[BoxStart]]) -> None:
        """Let all slots of the run restart from a saved state, where that is quicker than to replay the launch.
        `starts`: returns the position and state of each box."""

    def close(self, *, forget: bool = True) -> None:
        """Close the run. May be called again."""


class Reader(Protocol):
    """Interface of a reader, which returns the batches of one box (data-parallel rank) in order."""

    position: Position
    stats: StreamStats
    began_at: int
    wait_s: float
    layout: tuple[Structure, list[int]] | None
    counts: DeliveredCounts
    thread: int

    @property
    def run(self) -> StreamRun: ...
    @property
    def copies(self) -> int: ...
    @property
    def held(self) -> int: ...

    def next(self) -> Any:
        """Return the next batch of the box, or EPOCH_ENDED at the end of an epoch."""

    def flush(self) -> bool:
        """Tell the workers which batches were delivered. Return False if some of these messages could not be sent
        yet."""

    def open_epochs(self, limit: int, label: int | None = None) -> None:
        """Allow the workers to make batches of the epochs up to and including number `limit`.

        label: what user code of a pure loader sees as the number of the position's epoch, if this call opens it. None:
        it counts on.
        """

    def announce(self, schedule: CheckpointSchedule, last: int | None) -> int | None:
        """Announce the next checkpoint steps to the workers. `last`: the executor's last step; None if unknown. Return
        the step at which to announce again; None if no checkpoint step was announced."""

    def abandon_epoch(self) -> None:
        """Abandon the epoch after the last delivered batch; the next batch is the first of the next epoch."""

    def end_epoch(self) -> bool:
        """Go to the next epoch from the last batch that len() of the workers' loaders promises. Return True if no
        further batch was due; else abandon the epoch, and return False."""

    def raise_failed(self, view: pb.SlotView) -> NoReturn:
        """Raise the error of a slot that has failed and is not restarted. `view`: the coordinator's view of the
        slot."""

    def open_lanes(self) -> list[Literal["local", "tcp"]]:
        """Return the transport of each open lane (connection of a worker slot)."""

    def close(self) -> None:
        """Close the reader. Batches that the loop still holds stay valid."""


def placed(error: PenstockError, worker: str, box: int, slot: int, step: int) -> PenstockError:
    """Return the error with worker, box, slot and step added to its message."""
    where = f"worker {worker}, " if worker else ""
    message = f"{error.message} [{where}box {box}, slot {slot}, step {step}]"
    return type(error)(message, remote_traceback=error.remote_traceback)


def recovered(box: int, slot: int, why: str) -> str:
    """Return the text of the warning that a slot moved to another runner without a loss. `why`: reason of the move."""
    return f"worker slot {slot} of box {box} was recovered: {why}; the batches are the same as without the fault"


def tell_worker_info(label: str, views: Sequence[pb.SlotView]) -> bool:
    """Log what torch's get_worker_info() answers to the workers' loaders, and why, if a loader has called it. Return
    True then."""
    text = next(
        (WORKER_INFO_TEXTS.get(view.capabilities.worker_info) for view in views if view.capabilities.worker_info), None
    )
    if text is not None:
        _log.info("%s: %s", label, text)
    return text is not None


def warn_of_whole_input(label: str, views: Sequence[pb.SlotView], num_workers: int) -> bool:
    """Warn if no loader has called current_assignment() when the first batches arrive, because then each worker reads
    the whole input. Return True after a warning. `num_workers`: number of workers of all boxes together."""
    if num_workers < 2 or not all(
        view.HasField("capabilities") and not view.capabilities.looked_at_assignment for view in views
    ):
        return False
    warn_user(
        f"{label}: no worker read its assignment, so every worker streams the whole input, and each "
        "sample comes once from every worker. Let input_fn or its dataset read one share of the input: share "
        "a.global_worker_id of a.total_num_workers, with a = penstock.worker.current_assignment(), or the share of "
        "torch's get_worker_info()",
    )
    return True
