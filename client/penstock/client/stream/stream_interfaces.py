"""What a loader needs of an open run and of its reader, whatever makes the batches: worker processes, by way of a
coordinator and lanes (open_run.py, ordered_reader.py), or this process itself (penstock.client.in_process). And what
both of them say in the same words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import PenstockError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from penstock.client.stream.open_run import BoxProgress
    from penstock.client.stream.ordered_reader import StreamStats

__all__ = ["Reader", "StreamRun", "placed", "recovered", "warn_of_whole_input"]


class StreamRun(Protocol):
    """An open run of one box."""

    name: str
    box: int
    num_slots: int
    attempt: int
    seed: int
    cover: DigestCover
    error: PenstockError | None
    """Why it cannot go on."""
    views: list[pb.SlotView]
    progress: BoxProgress
    ended_boxes: dict[int, int]
    """Other boxes that take no further step -> their last one."""
    abandoned: bool
    """The loader is gone; set by its finalizer."""
    away_since: float | None

    @property
    def closed(self) -> bool: ...

    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        """Wait until the slots' views are as wanted. False if the time ran out."""

    def report(self) -> None:
        """Report progress now."""

    def fail(self, error: PenstockError) -> None:
        """The run cannot go on. From any thread."""

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        """The records of all workers of all boxes at a step."""

    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        """The loader's aggregate_state_dict: envelopes of the list of states and of what it returned."""

    def close(self, *, forget: bool = True) -> None:
        """Give the box's place back; safe to call again."""


class Reader(Protocol):
    """The batches of one box, in order."""

    position: Position
    stats: StreamStats
    first_step: int
    wait_s: float
    layout: tuple[Structure, list[int]] | None
    thread: int

    @property
    def run(self) -> StreamRun: ...
    @property
    def copies(self) -> int: ...
    @property
    def held(self) -> int: ...

    def next(self) -> Any:
        """The next batch, or EPOCH_ENDED."""

    def flush(self) -> bool:
        """Say what was delivered."""

    def open_epochs(self, limit: int) -> None:
        """Epochs up to this one may be opened."""

    def announce(self, schedule: CheckpointSchedule, last: int | None) -> int | None:
        """Say which states will be asked for next. Returns the step at which to do so again."""

    def abandon_epoch(self) -> None:
        """Abandon the epoch at this position."""

    def raise_failed(self, view: pb.SlotView) -> NoReturn:
        """The slot has failed and will deliver nothing any more."""

    def open_lanes(self) -> list[Literal["local", "tcp"]]:
        """The kind of each lane that is open."""

    def close(self) -> None:
        """Leave. Batches that the loop still holds stay valid."""


def placed(error: PenstockError, worker: str, box: int, slot: int, step: int) -> PenstockError:
    """The same error with its place."""
    message = f"{error.message} [worker {worker or 'no worker'}, box {box}, slot {slot}, step {step}]"
    return type(error)(message, remote_traceback=error.remote_traceback)


def recovered(box: int, slot: int, why: str) -> str:
    """What the loop is warned of."""
    return f"slot {slot} of box {box} was recovered: {why}; the stream goes on as if nothing had happened"


def warn_of_whole_input(label: str, views: Sequence[pb.SlotView], num_workers: int) -> bool:
    """Warn if no worker asked which part of the input is its own, once the first batches are out. `num_workers`: of all
    boxes."""
    if num_workers < 2 or not all(
        view.HasField("capabilities") and not view.capabilities.looked_at_assignment for view in views
    ):
        return False
    warnings.warn(
        f"{label}: no worker asked for its assignment, so every worker streams the whole input, and each "
        "sample comes once from every worker. Shard it in input_fn or its dataset: a = penstock.worker."
        "current_assignment() and a.global_worker_id of a.total_num_workers, or torch's get_worker_info()",
        UserWarning,
        stacklevel=3,
    )
    return True
