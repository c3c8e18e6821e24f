"""A slot without a worker process: the loader runs in the training process, in the thread that takes its batches.

Starts, returns and recovery are a runner's code (worker/loader), states a helper's (replayer.py). A batch is made only
when requested, so the loader is never ahead, and needs no ring, sockets or snapshots. A saved state holds the loader's
at the start of the launch, and the batches since; with exact states, the one at its position. If the loader's own
states are aggregated, a second loader is replayed to the step and saved.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.proto.batch.digest import cover_of, digests_of, rows_in
from penstock.proto.batch.flatten import ALIGN, Flattener, Structure
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import (
    InputFnError,
    PenstockError,
    ReplayMismatchError,
    StateUnavailableError,
    UnsupportedStateError,
)
from penstock.proto.lane.producer import check_size
from penstock.proto.state import assignment as assignments
from penstock.proto.state.codec import decode_state
from penstock.proto.state.envelope import with_bytes
from penstock.proto.state.generators import capture_rng, restore_rng
from penstock.proto.state.position import linked
from penstock.proto.v1 import records_pb2
from penstock.worker.loader import worker_info
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Leg, Target, plan_recovery
from penstock.worker.loader.restart_points import END, RestartPoint, StreamPosition
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.loader.start import compare_record, start
from penstock.worker.loader.travel import catch_up, leave, reach_any, recover, replay
from penstock.worker.loader.worker_info import describe_reads
from penstock.worker.processes.progress_page import BatchRecord
from penstock.worker.runner.replayer import state_at

_KEPT_SNAPSHOTS = 16
_SNAPSHOT_EVERY = 16


@dataclass(frozen=True)
class MadeBatch:
    """Batch as one region of memory, as a runner writes it into its ring."""

    structure: Structure
    shapes: list[int]
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    offset: int
    nbytes: int
    digest: int
    link: int
    samples: int
    counts: bytes
    """Counts that this batch has changed, encoded as in a BATCH frame."""


@dataclass(frozen=True)
class SlotState:
    data: bytes
    samples: int
    digest: int
    next_digest: int = 0
    next_epoch: bool = False
    chain: int = 0


@dataclass(frozen=True)
class _BatchRecord(BatchRecord):
    link: int = 0


@contextmanager
def _reraise_interrupts() -> Iterator[None]:
    """Raise Ctrl-C, and quitting a debugger, instead of the InputFnError that they have caused."""
    try:
        yield
    except InputFnError as error:
        if isinstance(error.__cause__, KeyboardInterrupt | BdbQuit):
            raise error.__cause__ from None
        raise


class ProcessGlobals:
    """Generators, assignment and get_worker_info() answers of one worker in this process. Workers still share
    PYTHONHASHSEED, environment, working directory, and globals of the user's modules."""

    def __init__(self) -> None:
        self._generators: bytes | None = None
        self._seat: assignments.Seat | None = None
        self._answers: worker_info.Answers | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this worker's global state in the block. The exchange takes 0.2 ms."""
        generators = capture_rng()
        if self._generators is not None:
            restore_rng(self._generators)
        seat = assignments.exchange(self._seat)
        answers = worker_info.exchange(self._answers)
        try:
            yield
        finally:
            self._answers = worker_info.exchange(answers)
            self._seat = assignments.exchange(seat)
            self._generators = capture_rng()
            restore_rng(generators)


class InProcessSlot:
    """Slot in this process. assignment: its loader has no arguments. make: calls input_fn. resume: encoded state; b""
    to start fresh. noted: newest batches whose digests are kept."""

    def __init__(
        self, assignment: records_pb2.WorkerAssignment, make: Callable[[], Any], resume: bytes, *, noted: int
    ) -> None:
        self._assignment, self._make, self._resume = assignment, make, resume
        options = assignment.loader.options
        self._cover, self._most = cover_of(options), options.max_batch_bytes
        self._flattener = Flattener(strict=options.strict_structure)
        self._replay_digest = ReplayDigest(self._flattener, cover=self._cover)
        self._globals = ProcessGlobals()
        self._start_data: bytes | None = None
        """Encoded start of this launch's stream; None before, or if the state cannot be taken or encoded."""
        self._snapshots: deque[tuple[StreamPosition, bytes]] = deque(maxlen=_KEPT_SNAPSHOTS)
        """Of a vouched loader: a resume makes the last batch again from one."""
        self._unsaved: Exception | None = None
        self._epoch_start = StreamPosition(0, 0, 0, 0)
        """Where this launch began the present epoch; within it after a resume."""
        self._abandoned: dict[int, int] = {}
        self._log: OrderedDict[int, _BatchRecord] = OrderedDict()
        self._noted = noted
        self._source: SlotLoader | None = None
        self._lost = False
        """True if the loader must be made again before the next use."""
        self.capabilities = records_pb2.LoaderCapabilities(length=-1)

    # ---- the stream

    def prepare(self) -> None:
        """Make the loader and go to the start position, once. Raises the errors that a runner would report."""
        if self._source is not None:
            return
        with self._globals.in_place(), _reraise_interrupts():
            resume: Any = decode_state(self._resume) if self._resume else None
            compare_record(self._unbuilt(), resume)
            source = self._built()
            start(source, resume, partial(self._keep, source), partial(self._go, source))
            self._source, self.capabilities = source, source.capabilities
            self._epoch_start = source.position.copy()
            describe_reads(self.capabilities)

    def next(self, step: int, epoch: int, total: int) -> MadeBatch | None:
        """Return the slot's batch `total + 1` for step `step`; None at the epoch's end. If the loader is not at (epoch,
        total), it is brought there. Ctrl-C in user code, and quitting a debugger, are raised unchanged, as they are
        meant for the whole process; the loader is then dropped, with an undelivered batch, and made again by the next
        call."""
        source = self._ready()
        if source.position.total != total:
            source = self._rebuilt(epoch, total)
        try:
            with self._globals.in_place(), _reraise_interrupts():
                if not source.is_open:
                    source.open_epoch(step=step)
                    self._epoch_start = source.position.copy()
                self._take_snapshot(source, step)
                batch = source.next()
                made = None if batch is END else self._made(batch, source.changed_counts())
                describe_reads(self.capabilities)
        except (KeyboardInterrupt, BdbQuit):
            self.lose()
            raise
        if made is not None:
            source.digest, source.chain = made.digest, linked(source.chain, made.link)
            source.position.samples += made.samples
            self._note(source, made.link)
        return made

    def _take_snapshot(self, source: SlotLoader, step: int) -> None:
        """Keep a snapshot if one is due: by number of batches, as replicas of a state from several processes must be
        equal. A failure shows at the next save."""
        if source.is_vouched and not source.is_ahead and source.position.delivered % _SNAPSHOT_EVERY == 0:
            with suppress(PenstockError):
                point = source.snapshot(step)
                self._snapshots.append((point.position, point.encode()))

    def _earlier(self, epoch: int, total: int) -> bytes | None:
        earlier = [data for position, data in self._snapshots if position.epoch == epoch and position.total < total]
        return earlier[-1] if earlier else None

    def leave(self, epoch: int, total: int) -> None:
        """Abandon an epoch after batch `total`. The loader may already have reached its end."""
        source = self._ready()
        position = source.position
        noted = self._log.get(total)
        if source.is_pure:
            source.abort()
            samples = position.samples if noted is None else noted.samples
            source.position = StreamPosition(epoch + 1, 0, total, samples)
            return
        with self._globals.in_place():
            if source.is_ahead or (position.epoch, position.total) != (epoch, total):
                self._recover(source, self._target(epoch, total))
            leave(source, epoch, total)
        self._abandoned[epoch] = total

    def label_epoch(self, epoch: int, label: int) -> None:
        self._assignment.start.labels.add(epoch=epoch, label=label)
        if self._source is not None:
            self._source.learn_labels({epoch: label})

    def lose(self) -> None:
        """Treat the loader as lost: the next call makes it again."""
        self._lost = True

    def failure(self, error: BaseException) -> PenstockError:
        source = self._ready()
        return source.failed(f"batch {source.position.total + 1}", error)

    def drop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.drop()

    def aggregate(self, states: list[Any]) -> Any:
        source = self._ready()
        with self._globals.in_place():
            return source.aggregate(states)

    def _unbuilt(self) -> SlotLoader:
        return SlotLoader(self._assignment, load=lambda spec: self._make)

    def _built(self) -> SlotLoader:
        source = self._unbuilt()
        source.build()
        return source

    def _ready(self) -> SlotLoader:
        if self._source is None:
            self.prepare()
        assert self._source is not None
        position = self._source.position
        return self._rebuilt(position.epoch, position.total) if self._lost else self._source

    def _rebuilt(self, epoch: int, total: int) -> SlotLoader:
        if self._source is not None:
            self._source.drop()
        self._globals = ProcessGlobals()
        with self._globals.in_place():
            source = self._built()
            if self._resume and source.by_own_methods:
                source.learn_resume(decode_state(self._resume))  # type: ignore[arg-type]
            self._recover(source, self._target(epoch, total))
        self._source, self.capabilities, self._lost = source, source.capabilities, False
        return source

    def _recover(self, source: SlotLoader, target: Target) -> None:
        if source.is_pure:
            reach_any(source, self._goal(target), partial(self._go, source))
            return
        plan = [] if self._start_data is None else plan_recovery([RestartPoint.decode(self._start_data)], target)
        if not plan:
            why = "the restart point at the start of this launch does not lead there"
            if self._unsaved is not None:
                why = f"the state of its loader could not be kept when this launch began: {self._unsaved}"
            raise ReplayMismatchError(
                f"{source.name}: cannot continue with batch {target.total + 1}: {why}. Start again from a saved state"
            )
        recover(source, plan, target, partial(self._go, source))
        catch_up(source, target.epoch)

    def _target(self, epoch: int, total: int) -> Target:
        noted = self._log.get(total)
        digest, chain = (0, 0) if noted is None else (noted.digest, noted.chain_in(epoch))
        return Target(epoch, total, self._abandoned, digest, chain)

    def _goal(self, target: Target) -> EpochGoal:
        start, epoch = self._epoch_start, target.epoch
        if start.epoch != epoch:  # nothing of this epoch was made
            return EpochGoal.beginning(epoch, target.total, start.samples)
        points = [EpochGoal.beginning(epoch, start.began, start.samples).ways[0]]
        if self._start_data is not None:
            points.append(RestartPoint.decode(self._start_data))
        goal = EpochGoal.within(epoch, target.total, start.began, points, target.chain, replay_s=0.0)
        return replace(goal, seeds=())  # in one process input_fn may return a dataset that has drawn before

    def _keep(self, source: SlotLoader, point: RestartPoint, begins: bool) -> None:
        """Keep the point if this launch begins there; only a runner needs later ones."""
        if not begins:
            return
        self._unsaved = source.unsaved
        if self._unsaved is None:
            try:
                self._start_data = source.marked(point, whole_history=True).encode()
            except UnsupportedStateError as error:
                self._unsaved = error

    def _go(self, source: SlotLoader, leg: Leg) -> None:
        def seen(batch: Any) -> None:
            source.count_replayed(batch, self._replay_digest)
            self._note(source, self._replay_digest.link)

        replay(source, leg, seen)

    def _made(self, batch: Any, counts: bytes) -> MadeBatch:
        flat = self._flattener.flatten(batch)
        structure, shapes, nbytes = flat.structure, flat.shapes, flat.nbytes
        check_size(nbytes, self._most)
        memory = np.empty(nbytes + ALIGN, np.uint8)
        offset = -memory.ctypes.data % ALIGN
        flat.write_to(memory.ctypes.data + offset)
        digest, link = digests_of(self._cover, structure, shapes, memory, offset, nbytes)
        return MadeBatch(structure, shapes, memory, offset, nbytes, digest, link, rows_in(structure, shapes), counts)

    def _note(self, source: SlotLoader, link: int) -> None:
        position, log = source.position, self._log
        log[position.total] = _BatchRecord(
            position.total, position.epoch, source.digest, position.samples, source.spent_s, source.chain, link
        )
        if len(log) > self._noted:
            log.popitem(last=False)

    # ---- states

    def state(self, epoch: int, delivered: int, total: int, step: int) -> SlotState:
        """Return the slot's part of a state at a position that was reached. delivered, total: batches in the epoch and
        in all."""
        source = self._ready()
        if self._unsaved is not None and self.capabilities.state_methods:
            raise self._unsaved
        if self._start_data is None:
            raise StateUnavailableError(
                f"{source.name}: no earlier state than batch {total} is kept to save it. Start again from a saved state"
            )
        position, exact = source.position, self.capabilities.exact_states
        is_here = (position.epoch, position.total) == (epoch, total) and source.is_open and not source.is_ahead
        if exact and is_here:
            earlier = self._earlier(epoch, total)
            with self._globals.in_place():
                data = source.snapshot(step).encode()
            if earlier is not None:
                data = with_bytes(data, "earlier", earlier) if self.capabilities.state_methods == 4 else earlier
            return self._answer(data, epoch, total)
        if self.capabilities.state_methods == 4:
            return self._replayed(epoch, delivered, total, step)
        if source.is_pure:
            goal = self._goal(Target(epoch, total))
            return self._answer(source.marked(goal.ways[0]).encode(), epoch, total)
        noted, began = self._log.get(total), RestartPoint.decode(self._start_data)
        if began.epoch == epoch:
            return self._answer(self._start_data, epoch, total)
        there = StreamPosition(epoch, delivered, total, noted.samples if noted is not None else began.position.samples)
        digest = noted.digest if noted is not None else began.digest
        return self._answer(
            source.marked(RestartPoint(there, None, b"", digest=digest, replayed_from=began)).encode(), epoch, total
        )

    def _answer(self, data: bytes, epoch: int, total: int) -> SlotState:
        record, following = self._log.get(total), self._log.get(total + 1)
        if record is None:  # no batch was made since the start of the launch
            position = RestartPoint.taken(data)
            record = _BatchRecord(total, epoch, position.digest, position.position.samples)
        if following is None:
            return SlotState(data, record.samples, record.digest, chain=record.chain_in(epoch))
        return SlotState(
            data, record.samples, record.digest, following.link, following.epoch > epoch, record.chain_in(epoch)
        )

    def _replayed(self, epoch: int, delivered: int, total: int, step: int) -> SlotState:
        """As `state`, from a second loader that replays."""
        assert self._start_data is not None
        point = RestartPoint.decode(self._earlier(epoch, total) or self._start_data)
        if self._ready().is_pure:
            point = self._goal(Target(epoch, total)).ways[-1]
        fields = {
            "epoch": epoch,
            "delivered": delivered,
            "total": total,
            "step": step,
            "digests": {str(count): noted.digest for count, noted in self._log.items() if count <= total},
            "left": {str(number): at for number, at in self._abandoned.items() if number < epoch},
            "abandoned_from": 0,
            "following": not self.capabilities.exact_states,
        }
        with ProcessGlobals().in_place():
            source = self._built()
            try:
                if self._resume:
                    source.learn_resume(decode_state(self._resume))  # type: ignore[arg-type]
                result, data = state_at(source, point, fields, ReplayDigest(cover=self._cover))
            finally:
                source.drop()
        if result.get("elsewhere") or result["ended"]:
            raise StateUnavailableError(
                f"{source.name}: the state of step {step} cannot be saved: replayed batches differ. Run penstock doctor"
            )
        return SlotState(
            data,
            result["samples"],
            result["digest"],
            result["following"],
            result["over"] and result["following"] > 0,
            result["chain"],
        )
