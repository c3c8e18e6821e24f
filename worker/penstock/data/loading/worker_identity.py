"""Identity of this process in a job: its box, and its number among the box's workers. In an input_fn it is the
assignment's, elsewhere torchrun's RANK and WORLD_SIZE or torch.distributed's, or a single process. A torch DataLoader's
processes share their parent's batches."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data._utils import worker as torch_worker

from penstock.data.arguments import whole
from penstock.data.ordering.partition import WorkerTurn
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.assignment import NEUTRAL, process_assignment
from penstock.runtime.process.ranks import launched_ranks


@dataclass(frozen=True)
class WorkerIdentity:
    box: int
    boxes: int
    slot: int
    workers: int
    """Workers of each box."""
    number: int
    """Number among all boxes' workers (global_worker_id)."""
    all_workers: int
    seed: int
    """The run's; 0 outside a worker."""
    standalone: bool
    """True in a process that is not a worker of Penstock."""

    @staticmethod
    def now(rank: tuple[int, int] | None = None) -> WorkerIdentity:
        """Return the caller's identity. `rank`: in place of (box, number of boxes)."""
        assignment = process_assignment()
        standalone = assignment is NEUTRAL
        if rank is None:
            rank = launched_ranks() or (0, 1) if standalone else (assignment.box, assignment.num_boxes)
        box, boxes = _checked(rank)
        return WorkerIdentity(
            box,
            boxes,
            assignment.slot,
            assignment.num_workers_per_box,
            assignment.global_worker_id,
            assignment.num_boxes * assignment.num_workers_per_box,
            assignment.seed,
            standalone,
        )

    def turn(self, first: int = 0) -> WorkerTurn:
        """Return which of its box's batches this process makes: slots take turns, and so do a slot's torch processes
        with its batches. `first`: slot of the first batch."""
        info = torch_worker._worker_info  # in a runner, get_worker_info() describes the runner itself
        number = (self.slot - first) % self.workers
        if info is None:
            return WorkerTurn(number, self.workers)
        # The first process of a slot makes the slot's first batch, also if the slot is not the first one.
        return WorkerTurn(number + self.workers * info.id, self.workers * info.num_workers)

    def alone(self, turn: WorkerTurn) -> bool:
        """Return True if this process makes all of its box's batches outside a worker: its loader may begin epochs by
        itself."""
        return self.standalone and turn.of == 1


def global_batch(batch_size: int | None, global_batch_size: int | None, boxes: int, *, unbatched: bool = False) -> int:
    """Return the rows of a step over all boxes. `unbatched`: samples are batches, of which each box gets one a step."""
    if unbatched and batch_size is None and global_batch_size is None:
        return boxes
    if unbatched:
        raise InvalidArgumentError(
            "batch_size and global_batch_size must be None with unbatched=True: the samples are the batches"
        )
    batch_size, global_batch_size = whole("batch_size", batch_size), whole("global_batch_size", global_batch_size)
    if (batch_size is None) == (global_batch_size is None):
        raise InvalidArgumentError(
            f"exactly one of batch_size and global_batch_size must be given, got {batch_size} and {global_batch_size}"
        )
    batch = batch_size * boxes if batch_size is not None else global_batch_size
    assert batch is not None
    if batch < boxes:
        given = f"batch_size={batch_size}" if batch_size is not None else f"global_batch_size={global_batch_size}"
        raise InvalidArgumentError(f"{given} must give each of {boxes} boxes at least one row. Use larger batches")
    return batch


def _checked(pair: tuple[int, int]) -> tuple[int, int]:
    try:
        rank, ranks = pair
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"rank must be a pair (this rank, number of ranks), got {pair!r}") from None
    rank, ranks = whole("rank", rank), whole("ranks", ranks)
    if not 0 <= rank < ranks:
        raise InvalidArgumentError(f"rank must be at least 0 and below the {ranks} ranks, got {rank}")
    return rank, ranks
