"""A stream: an open run, and the reader of its batches. They come from worker processes over lanes (open_run.py,
ordered_reader.py), or are made in this process (penstock.client.in_process); here is what both share."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from penstock.client.states.code_reference import CodeReference
from penstock.client.states.saved_state import BoxStart
from penstock.client.stream.box_progress import BoxProgress, DeliveredCounts
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import DeadlineError, NoWorkersError, PenstockError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.assignment import WORKER_INFO_TEXTS
from penstock.proto.state.counts import SampleCounts
from penstock.proto.state.found_generators import SAME_DRAWS, same_draws
from penstock.proto.state.position import Position
from penstock.proto.tracebacks import warn_user
from penstock.proto.v1 import coordinator_pb2 as pb

_log = logging.getLogger("penstock.client")

NO_WORKER = (pb.SLOT_PHASE_UNSPECIFIED, pb.WAITING)
EPOCH_ENDED: Final = object()
"""Result of `Reader.next` at the end of an epoch, instead of a batch."""


@dataclass(frozen=True)
class Opening:
    reference: CodeReference
    arguments: bytes
    """input_fn's arguments, as other processes decode them (code_reference.py)."""
    make: Callable[[], Any]
    """Calls input_fn with a copy of its arguments, in this process."""
    start_of: Callable[[int], BoxStart]
    """Returns the start of the box with a given number."""
    start: BoxStart
    seed: int | None
    """None: that of the resumed run, or a random one."""
    key: str
    """Differs between a loader's openings in one launch, so that the coordinator recognises a repeated request."""
    replay: bool
    """A loader without state methods may be saved too: its batches are counted, and made again after a resume."""
    cover: DigestCover


@dataclass
class StreamStats:
    """Statistics of a loader's stream since its first loop began or a state was loaded."""

    steps: int = 0
    """Number of batches delivered to the loop."""
    waited_s: float = 0.0
    """Seconds for which the loop waited for batches."""
    waited_by_worker: dict[str, float] = field(default_factory=dict)
    """Seconds for which the loop waited for batches, by the name of the worker that was to make them. Waits for a slot
    that had no worker are in `waited_s` alone."""
    copies: int = 0
    """Number of batches delivered as copies, because the loop held views of too many batches."""
    ahead: int = 0
    """Number of batches whose copy to the device was started before the loop requested them; 0 without a device."""
    recoveries: int = 0
    """Number of times that a slot has moved to another runner, after a fault or as planned."""
    corrupt: int = 0
    """Number of times that data arrived damaged, over the network or from memory, and were fetched again."""
    skipped: int = 0
    """Number of poison batches, which kill their runner, left out in the present attempt (poison="skip")."""
    sources: dict[str, SampleCounts] = field(default_factory=dict)
    """Counts of the delivered samples by source, over the whole life of the run; empty unless the loader has `counts`
    (penstock.data.Counts). Each box has its own. After a resume on another number of boxes, box 0 continues the counts
    of all, so the sum over all boxes is always that of the run."""
    keys: dict[str, SampleCounts] = field(default_factory=dict)
    """The same by key; empty unless the loader counts by a key (penstock.data.Counts(by=))."""
    imbalance: float | None = None
    """Cost of the most expensive box in a step, divided by the mean cost of all boxes, as the mean over this box's
    delivered steps. None unless the loader has `counts` and `balance` (penstock.data.Balance)."""


class StreamRun(ABC):
    def __init__(self, name: str, box: int, num_boxes: int, num_slots: int, cover: DigestCover) -> None:
        self.name, self.box, self.num_slots, self.cover = name, box, num_slots, cover
        self.num_boxes = num_boxes
        self.num_workers = num_boxes * num_slots
        """Number of slots of all boxes together."""
        self.attempt = self.seed = 0
        self.error: PenstockError | None = None
        """What has ended the run, such as a newer attempt of the job."""
        self.closed = False
        self.views = [pb.SlotView(slot=slot) for slot in range(num_slots)]
        """Worker, address and condition of each slot."""
        self.progress = BoxProgress()
        self.ended_boxes: dict[int, int] = {}
        """Last step of the epoch of each box that has ended one and not begun the next."""
        self.box_apart: pb.BoxEnd | None = None
        """A box that is in another epoch than this one."""
        self.twin: int | None = None
        """Another box that got an equal first batch."""
        self.unplaced_because = ""
        """Workers that cannot take slots for their lane protocol, with the remedy; "" if none, or no slot waits."""
        self.abandoned = False
        """True once the loader was garbage-collected; its finalizer sets it."""
        self.away_since: float | None = None
        """Time of time.monotonic() of the present outage's first unanswered call; None: the coordinator answers."""
        self.away_because = ""
        """Error of the latest unanswered report; "" if all were answered."""

    @abstractmethod
    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        """Wait until `ready(self)`; False after `timeout_s` with a coordinator, or if the run is closed. Raises what
        ended it."""

    @abstractmethod
    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        """Return positions and WorkerRecords of all boxes at a step, or raise an error after `deadline_s` seconds."""

    @abstractmethod
    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        """Run the loader's aggregate_state_dict on an envelope of the workers' states. Return an envelope."""

    @abstractmethod
    def close(self, *, forget: bool = True) -> None:
        """Close the run, also again. `forget`: it will not be opened again, and an embedded coordinator can drop it."""

    def fail(self, error: PenstockError, *, gone: bool = False) -> None:
        """End the run with an error, which the training loop will get. May be called from any thread. `gone`: the
        coordinator has ended for good, and calls under way end too."""
        self.error = error

    def report(self) -> None:  # noqa: B027
        """Report this box's progress to the coordinator now, if there is one."""

    def offer(self, starts: Callable[[], list[BoxStart]]) -> None:  # noqa: B027
        """Let slots restart from a saved state (of each box), where that is quicker than to replay the launch."""


class Reader(ABC):
    """Reader of the batches of one box, in the order of the box's position."""

    run: StreamRun

    def __init__(self, run: StreamRun, position: Position, label: str, timeout_s: float) -> None:
        self.run, self.position = run, position
        self.label = label
        self._timeout_s = timeout_s
        self.stats = StreamStats()
        self.began_at = position.step
        """Number of the last step before the first batch of this reader."""
        self.wait_s = 0.0
        self.layout: tuple[Structure, list[int]] | None = None
        self.thread = threading.get_ident()
        """Only this thread takes batches; others may look at them."""
        self.counts = run.progress.counts = DeliveredCounts(run.num_slots)
        self._told: set[object] = set()
        run.progress.waited_by_slot = [0.0] * run.num_slots

    @abstractmethod
    def next(self) -> Any:
        """Return the next batch of the box, or EPOCH_ENDED at the end of an epoch."""

    @abstractmethod
    def open_epochs(self, limit: int, label: int | None = None) -> None:
        """Allow the workers to make epochs up to number `limit`. label: what user code of a pure loader sees as the
        number of the position's epoch, if this call opens it; None: it counts on."""

    @abstractmethod
    def abandon_epoch(self) -> None:
        """Abandon the epoch after the last delivered batch; the next batch is the first of the next epoch."""

    @abstractmethod
    def end_epoch(self) -> bool:
        """Go to the next epoch after the last batch by len(). Return False, and abandon it, if another was due."""

    @abstractmethod
    def raise_failed(self, view: pb.SlotView) -> NoReturn:
        """Raise the error of a slot that has failed and is not restarted. `view`: the coordinator's."""

    # ---- what a reader without lanes has nothing to do for

    @property
    def copies(self) -> int:
        """Number of batches delivered as copies and not as views of the ring."""
        return 0

    @property
    def held(self) -> int:
        """Number of delivered batches of which the loop has views. May be read from any thread."""
        return 0

    def flush(self) -> bool:
        """Tell the workers which batches were delivered. Return False if a message could not be sent yet."""
        return True

    def announce(self, schedule: CheckpointSchedule, last: int | None) -> int | None:
        """Announce checkpoint steps. Return the step at which to announce again; None if none was announced."""
        return None

    def open_lanes(self) -> list[Literal["local", "tcp"]]:
        """Return the transport of each open lane. May be called from any thread."""
        return []

    def close(self) -> None:  # noqa: B027
        """Close the reader. Batches that the loop still holds stay valid."""

    # ---- errors, figures and notices

    def late(self, view: pb.SlotView, waited_s: float, what: str, away_s: float = 0.0, lost: str = "") -> DeadlineError:
        """Return the error of a wait that ran out: what the slot's runner does, with its stack. `what`: awaited thing;
        `away_s`: seconds of the wait without a coordinator; `lost`: why there is no connection to the slot's worker, if
        there is none."""
        run = self.run
        away = f"; for {away_s:.0f} s of them the coordinator did not answer" if away_s >= 1 else ""
        if run.away_since is not None:
            seconds = time.monotonic() - run.away_since
            away = f"; the coordinator has not answered for {seconds:.0f} s ({run.away_because})"
        waited = f"{self.label}: box {run.box} waited {waited_s:.0f} s for {what}"
        if view.phase in NO_WORKER:
            missing = sum(v.phase in NO_WORKER for v in run.views)
            because = f". {run.unplaced_because}" if run.unplaced_because else ""
            return NoWorkersError(
                f"{waited}: {missing} of its {run.num_slots} worker slots have no worker (slot {view.slot} is due)"
                f"{away}{because or '. Start more `penstock worker`s, or lower num_workers_per_box'}"
            )
        starting = f"its runner is {queued(view) if view.start_queue_position else 'still starting'}"
        doing = {pb.STARTING: starting, pb.READY: "its next batch has not arrived"}
        activity = f"its runner is {view.doing}" if view.doing else doing.get(view.phase, "it has failed")
        why_closed = f"; no connection to its worker: {lost}" if lost else ""
        return DeadlineError(
            f"{waited} from worker slot {view.slot} on worker {view.worker or 'unknown'}: {activity}{why_closed}{away} "
            f"(timeout_s={self._timeout_s:g})",
            remote_traceback=view.stack if view.doing else "",
        )

    def _check_open(self) -> None:
        if self.run.error is not None:
            raise self.run.error
        if self.run.closed:
            raise PenstockError(f"{self.label}: its Appliance was closed inside the loop: close it after the loop")

    def _waited(self, slot: int, worker: str, seconds: float) -> None:
        self.wait_s += seconds
        stats = self.stats
        stats.waited_s += seconds
        if worker:
            stats.waited_by_worker[worker] = stats.waited_by_worker.get(worker, 0.0) + seconds
        self.run.progress.waited_by_slot[slot] += seconds

    def _tell_of_loaders(self) -> None:
        """Tell once what the first batches reveal: no loader called current_assignment(), so that each worker reads the
        whole input, what torch's get_worker_info() answers, and which random generators were found."""
        views = self.run.views
        known = all(view.HasField("capabilities") for view in views)
        unsharded = known and not any(view.capabilities.looked_at_assignment for view in views)
        if unsharded and self.run.num_workers > 1 and self.once("unsharded"):
            warn_user(
                f"{self.label}: no worker read its assignment, so every worker streams the whole input. Let input_fn "
                "read share a.global_worker_id of a.total_num_workers, with a = penstock.worker.current_assignment(), "
                "or that of torch's get_worker_info()",
            )
        elif self.run.twin is not None and self.once("twin"):
            warn_user(
                f"{self.label}: box {self.run.box} and box {self.run.twin} got the same first batch. If each must have "
                "its own rows, give each rank its own RANK, or its own box= and all the same num_boxes=, and let "
                "input_fn read share a.global_worker_id of a.total_num_workers"
            )
        told = next((view.capabilities.worker_info for view in views if view.capabilities.worker_info), None)
        if told in WORKER_INFO_TEXTS and self.once("worker info"):
            _log.info("%s: %s", self.label, WORKER_INFO_TEXTS[told])
        found = views[0].capabilities
        if known and found.generators and self.once("generators"):
            told_of = f"{self.label}: random generators {found.generators}"
            if same_draws([view.capabilities.generators_state for view in views]):
                warn_user(f"{told_of}. {SAME_DRAWS}")
            else:
                _log.info("%s", told_of)

    def once(self, what: object) -> bool:
        """Return True at the first call with `what`, to tell the user once."""
        first = what not in self._told
        self._told.add(what)
        return first


def queued(view: pb.SlotView) -> str:
    return f"number {view.start_queue_position} of {view.start_queue_length} in the queue of runners to start"


def placed(error: PenstockError, worker: str, box: int, slot: int, step: int) -> PenstockError:
    where = f"worker {worker}, " if worker else ""
    message = f"{error.message} [{where}box {box}, slot {slot}, step {step}]"
    return type(error)(message, remote_traceback=error.remote_traceback)


def recovered(box: int, slot: int, why: str) -> str:
    return f"worker slot {slot} of box {box} was recovered: {why}; the batches are the same as without the fault"
