"""Stream whose worker slots are in the training process and thread: for `Appliance(num_workers_per_box=0)` and
`penstock.client.testing`. Slots run the worker's own code (penstock.worker.runner.in_process_slot), so batches and
states are the same.

A state covers all boxes, so the slots of other boxes are created here too when one is requested, on the assumption that
all loops take the same steps as this box's, and leave an epoch after the same step."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

import torch

from penstock.client.states.saved_state import BoxStart
from penstock.client.stream import open_streams
from penstock.client.stream.streams import EPOCH_ENDED, Opening, Reader, StreamRun, placed, recovered
from penstock.proto.batch.flatten import Assembler, wrap_buffer
from penstock.proto.errors import DeadlineError, PenstockError, StateUnavailableError
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.epoch_labels import put_label
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.tracebacks import warn_user
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.forks import OwnerProcess
from penstock.worker.runner.in_process_slot import InProcessSlot, MadeBatch

HERE: Final = "this process"


class Fault(Protocol):
    """Fault to inject into a run before a chosen step, for tests."""

    @property
    def step(self) -> int:
        """Step before whose batch the fault happens, once; from 1, over the whole life of the run."""

    def strike(self, reader: InProcessReader) -> None:
        """Cause the fault. An error that this method raises is raised in the training loop."""


class _Box:
    def __init__(self, number: int, start: BoxStart, slots: list[InProcessSlot], kept: int) -> None:
        self.number = number
        self.slots = slots
        self.position = Position.from_proto(start.position)
        self._at: OrderedDict[int, Position] = OrderedDict()
        self._kept = kept

    def deliver(self, made: MadeBatch) -> None:
        self.position.deliver(made.digest)
        self._at[self.position.step] = self.position.copy()
        if len(self._at) > self._kept:
            self._at.popitem(last=False)

    def make(self, slot: int) -> MadeBatch | None:
        """Return the next batch of a slot; None at its end of the epoch."""
        position = self.position
        return self.slots[slot].next(position.step + 1, position.epoch, position.total[slot])

    def exhaust(self, slot: int) -> bool:
        """Record that the slot whose turn it is has no more batches. Return True if the epoch has ended."""
        if by_own_methods(self.slots[slot].capabilities):
            self.position.carry()
        return self.position.exhaust()

    def abandon_epoch(self) -> None:
        for slot, total in zip(self.slots, self.position.total, strict=True):
            slot.leave(self.position.epoch, total)
        self.position.abandon_epoch()

    def go(self, step: int, last_epoch: int, abandoned: dict[int, int]) -> None:
        """Deliver batches up to `step`, leaving the `abandoned` epochs early, and beginning none after `last_epoch`."""
        position = self.position
        while position.step < step and position.epoch <= last_epoch:
            if abandoned.get(position.epoch) == position.step and any(position.delivered):
                self.abandon_epoch()
                continue
            slot = position.turn
            made = self.make(slot)
            if made is not None:
                self.deliver(made)
            else:
                self.exhaust(slot)

    def label_epoch(self, epoch: int, label: int) -> None:
        put_label(self.position.labels, epoch, label)
        for slot in self.slots:
            slot.label_epoch(epoch, label)

    def at(self, step: int) -> Position:
        """Return the box's position after a step, or its last. Raises StateUnavailableError if it is not kept."""
        known = self._at.get(step)
        if known is not None:
            return known
        if step >= self.position.step:  # this box took fewer steps than the loop's box
            return next(reversed(self._at.values()), self.position)
        raise StateUnavailableError(
            f"box {self.number}: the state of step {step} is not kept any more: pass a larger retention_steps"
        )


class InProcessRun(StreamRun):
    def __init__(
        self,
        name: str,
        box: int,
        num_boxes: int,
        num_workers_per_box: int,
        options: records_pb2.Options,
        opening: Opening,
        seed: int,
        on_closed: Callable[[StreamRun], None],
    ) -> None:
        super().__init__(name, box, num_boxes, num_workers_per_box, opening.cover)
        self.seed, self.attempt = seed, 1
        self.lock = threading.RLock()
        """Held while user code of a slot runs, because slots share the process's random generators."""
        self.last_epoch = opening.start.position.epoch
        """Latest epoch that the slots may begin."""
        self.abandoned_epochs: dict[int, int] = {}
        """Last step of each abandoned epoch, by its number."""
        self._opening, self._options, self._on_closed = opening, options, on_closed
        self._boxes: dict[int, _Box] = {}
        self._labels: dict[int, int] = {}
        self.failures: dict[int, PenstockError] = {}
        """By the number of the slot whose loader could not be made."""
        self._owner = OwnerProcess()

    def check(self) -> None:
        """Raise ForkedProcessError in a fork of the process that opened the run."""
        self._owner.check(f"run {self.name}, box {self.box}")

    def box_of(self, number: int) -> _Box:
        if number not in self._boxes:
            start = self._opening.start_of(number)
            slots = [self._slot(number, slot, start) for slot in range(self.num_slots)]
            self._boxes[number] = _Box(number, start, slots, self._options.retention_steps + 1)
            for epoch, label in self._labels.items():
                self._boxes[number].label_epoch(epoch, label)
        return self._boxes[number]

    def label_epoch(self, epoch: int, label: int) -> None:
        """Give an epoch that no box has begun the number that user code of a pure loader sees."""
        put_label(self._labels, epoch, label)
        with self.lock:
            for box in self._boxes.values():
                box.label_epoch(epoch, label)

    def _slot(self, box: int, slot: int, start: BoxStart) -> InProcessSlot:
        reference = self._opening.reference
        assignment = records_pb2.WorkerAssignment(
            run=self.name,
            attempt=self.attempt,
            box=box,
            slot=slot,
            generation=1,
            num_boxes=self.num_boxes,
            num_workers_per_box=self.num_slots,
            seed=self.seed,
            loader=records_pb2.LoaderSpec(input_fn=reference.name, title=reference.title, options=self._options),
            start=start.position,
        )
        if start.blob:
            assignment.resume.CopyFrom(start.resume(HERE))
        return InProcessSlot(assignment, self._opening.make, start.blob, noted=self._options.retention_steps + 2)

    def prepare(self) -> None:
        """Create the loader of each slot of this box. Errors are raised when a batch of the slot is due."""
        for view, slot in zip(self.views, self.box_of(self.box).slots, strict=True):
            if view.phase in (pb.READY, pb.FAILED):
                continue
            view.worker, view.generation = HERE, 1
            try:
                slot.prepare()
                view.phase = pb.READY
                view.capabilities.CopyFrom(slot.capabilities)
            except PenstockError as error:
                view.phase = pb.FAILED
                view.error.CopyFrom(detail_of(error))
                self.failures[view.slot] = error

    # ---- requests of a loader

    def wait_for(self, ready: Callable[[StreamRun], bool], timeout_s: float) -> bool:
        if self.error is not None:
            raise self.error
        with self.lock:
            self.prepare()
        return ready(self)

    def fetch_state(self, step: int, deadline_s: float) -> FetchedState:
        self.check()
        fetched = FetchedState()
        with self.lock:
            for number in range(self.num_boxes):
                box = self.box_of(number)
                if number != self.box:
                    box.go(step, self.last_epoch, self.abandoned_epochs)
                self._add(fetched, box, step)
        return fetched

    def _add(self, fetched: FetchedState, box: _Box, step: int) -> None:
        position = box.at(step)
        fetched.positions[box.number] = position.to_proto()
        for number, slot in enumerate(box.slots):
            total = position.total[number]
            try:
                state = slot.state(position.epoch, position.delivered[number], total, step)
            except PenstockError as error:
                message = f"state of run {self.name} at step {step}: box {box.number} slot {number}: {error.message}"
                raise type(error)(message, remote_traceback=error.remote_traceback) from error
            record = pb.WorkerRecord(
                local_worker_id=number,
                num_workers_per_box=self.num_slots,
                num_boxes=self.num_boxes,
                box=box.number,
                step=step,
                worker_step=total,
                samples_streamed=state.samples,
                state_bytes=len(state.data),
                epoch=position.epoch,
                capabilities=slot.capabilities,
                digest=state.digest,
                next_digest=state.next_digest,
                next_epoch=state.next_epoch,
                chain=state.chain,
            )
            fetched.records.append((record, state.data))

    def aggregate(self, states: bytes, deadline_s: float) -> bytes:
        self.check()
        with self.lock:
            return encode_state(self.box_of(self.box).slots[0].aggregate(decode_state(states)))  # type: ignore[arg-type]

    def close(self, *, forget: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        for box in self._boxes.values():
            for slot in box.slots:
                slot.drop()
        self._on_closed(self)


class InProcessReader(Reader):
    """Reader of one box's batches, made on request in memory of their own, on `device` ("": CPU)."""

    run: InProcessRun

    def __init__(
        self, run: InProcessRun, label: str, device: str, timeout_s: float, faults: Sequence[Fault] = ()
    ) -> None:
        self._box = run.box_of(run.box)
        super().__init__(run, self._box.position, label, timeout_s)
        self._device = device if device != "cpu" else ""
        self._faults = sorted(faults, key=lambda fault: fault.step)
        run.progress.position = self.position.to_proto
        open_streams.readers.add(self)

    # ---- the stream

    def next(self) -> Any:
        run, box = self.run, self._box
        run.check()
        self._check_open()
        began, self.wait_s = time.monotonic(), 0.0
        with run.lock:
            run.prepare()
            try:
                made = self._make(box)
            finally:
                self._waited(box.position.turn, HERE, time.monotonic() - began)
        if made is None:
            return EPOCH_ENDED
        batch = self._assembled(made)
        slot = box.position.turn
        box.deliver(made)
        if made.counts:
            self.counts.take(slot, made.counts)
        self.layout = made.structure, made.shapes
        self._tell_of_loaders()
        return batch

    def _make(self, box: _Box) -> MadeBatch | None:
        while True:
            slot = box.position.turn
            view = self.run.views[slot]
            if view.phase == pb.FAILED:
                self.raise_failed(view)
            self._strike(box.position.step + 1)
            try:
                made = box.make(slot)
            except PenstockError as error:
                self._raise(error)
            if made is not None:
                made_by = box.slots[slot].capabilities
                view.capabilities.looked_at_assignment |= made_by.looked_at_assignment
                view.capabilities.worker_info = made_by.worker_info
                return made
            if box.exhaust(slot):
                return None

    def _assembled(self, made: MadeBatch) -> Any:
        move = self._moved if self._device else None
        buffer = wrap_buffer(made.memory)
        return Assembler(made.structure).assemble(made.shapes, buffer, made.offset, made.nbytes, move=move)

    def _moved(self, leaves: list[Any]) -> list[Any]:
        return [leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    # ---- errors and faults

    def failed(self, error: PenstockError) -> PenstockError:
        """End the run, because the slot whose turn it is failed. Return the error with its place added."""
        position, run = self.position, self.run
        run.error = placed(error, HERE, run.box, position.turn, position.step + 1)
        # the cause has this process's own traceback, which Python prints with the error
        if error.__cause__ is not None:
            run.error.remote_traceback = ""
        return run.error

    def _raise(self, error: PenstockError) -> NoReturn:
        raise self.failed(error) from error.__cause__

    def raise_failed(self, view: pb.SlotView) -> NoReturn:
        self._raise(self.run.failures[view.slot])

    def _strike(self, step: int) -> None:
        while self._faults and self._faults[0].step <= step:
            fault = self._faults.pop(0)
            if fault.step == step:
                fault.strike(self)

    @property
    def due(self) -> InProcessSlot:
        return self._box.slots[self.position.turn]

    def delay(self, seconds: float) -> None:
        """Delay the next batch. Raises DeadlineError after `timeout_s`; the loop can request the batch again."""
        time.sleep(min(seconds, self._timeout_s))
        if seconds >= self._timeout_s:
            position, run = self.position, self.run
            raise DeadlineError(
                f"{self.label}: box {run.box} waited timeout_s={self._timeout_s:g} s for step {position.step + 1} from "
                f"worker slot {position.turn} on worker {HERE}"
            )

    def replace_worker(self, why: str) -> None:
        """Act as if the worker of the slot whose turn it is had been lost."""
        run, slot = self.run, self.position.turn
        self.due.lose()
        run.views[slot].restarts += 1
        self.stats.recoveries += 1
        warn_user(f"{self.label}: {recovered(run.box, slot, why)}")

    # ---- between batches

    def open_epochs(self, limit: int, label: int | None = None) -> None:
        run, position = self.run, self.position
        if label is not None and position.epoch > run.last_epoch and label != position.label:
            run.label_epoch(position.epoch, label)
        run.last_epoch = max(run.last_epoch, limit)

    def abandon_epoch(self) -> None:
        position, run = self.position, self.run
        if not any(position.delivered):
            return  # no batch of the epoch was taken
        run.abandoned_epochs[position.epoch] = position.step
        with run.lock:
            self._box.abandon_epoch()

    def end_epoch(self) -> bool:
        run = self.run
        run.check()
        with run.lock:
            run.prepare()
            left = self._make(self._box)
        if left is not None:
            self.abandon_epoch()
        return left is None
