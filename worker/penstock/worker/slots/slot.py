"""A slot on this worker: a logical worker of a run, whose loader a child process, the runner, runs.

A Slot is one generation: it ends when the runner dies or the slot moves. The daemon never runs user code; tasks that
need it go to helper processes. The parts share slot_record.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import Any

from penstock.proto.errors import JournalError, PenstockError, WorkerLostError
from penstock.proto.rpc.wire_errors import cut, detail_of
from penstock.proto.state.assignment import WORKER_INFO_TEXTS
from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.processes.child_processes import LOOK_S, Child, about_slot, descriptors_closed, how_it_ended
from penstock.worker.processes.control_channel import ControlMessage, counts, invalid_message
from penstock.worker.processes.process_use import NOTHING, family, used_by
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.stack_dump import state_of
from penstock.worker.processes.turn_queue import QueueTurn
from penstock.worker.slots.durable_snapshots import DurableSnapshots
from penstock.worker.slots.helper_tasks import run_task, send_assignment
from penstock.worker.slots.lanes import SlotLanes
from penstock.worker.slots.runner_watch import LOOKS, BatchRates, MemoryWatch, Stall, hang_s
from penstock.worker.slots.slot_record import COORDINATOR_ERRORS, SlotHost, SlotRecord
from penstock.worker.slots.slot_states import SlotStates
from penstock.worker.slots.snapshots import HEADER, SlotSnapshots, StoredSnapshot

_log = logging.getLogger("penstock.worker")

STOP_GRACE_S = 0.5
MOST_ABANDONED = 1024
"""Abandoned epochs of a slot that are known: the last ones."""
MAX_REPORT_BYTES = 8 << 10
"""Of a runner's report about its loader, in each heartbeat."""
MAX_UNSAVED_TEXT = 1000
"""Characters of the text that says why the loader's states are not used."""
FRESH_S = 0.3
"""Longest wait for a snapshot to start a migration's target from. An older one will do."""
STAGE_S = 1.5
"""Seconds between two checks of the stage of a start, such as INPUT_FN, which the coordinator is told."""
KILL_S = 10.0
"""Seconds until a killed process ends; one that hangs in a driver or a file system does not."""
_STAGES = {
    "input_fn": coordinator_pb2.INPUT_FN,
    "iter": coordinator_pb2.FIRST_BATCH,
    "next": coordinator_pb2.FIRST_BATCH,
    "state_dict": coordinator_pb2.RESTORE,
    "load_state_dict": coordinator_pb2.RESTORE,
    "replay": coordinator_pb2.RESTORE,
}


class Slot:
    def __init__(self, host: SlotHost, assignment: records_pb2.WorkerAssignment) -> None:
        self._host = host
        self.record = SlotRecord(
            assignment,
            f"{assignment.run} box {assignment.box} slot {assignment.slot}",
            SubjectLogger(_log, **about_slot(assignment), worker=host.name),
            ProgressPage.create(),
            SlotSnapshots(host.slot_bytes // 2),
        )
        self._states = SlotStates(self.record, host, partial(run_task, host, self.record))
        self.durable = DurableSnapshots(self.record, host)
        self.lanes = SlotLanes(self.record, self._fetch_restart_points, self._spawn)
        self._stall = Stall(since=time.monotonic())
        self._doing = self._stack = ""
        self._rates = BatchRates(time.monotonic())
        self._making: records_pb2.Skip | None = None
        self._turn: QueueTurn | None = None
        self._awaits_fork_server = False
        self._stage_reported: coordinator_pb2.StartStage.ValueType = coordinator_pb2.START_STAGE_UNSPECIFIED
        self._stopping = False
        self._life: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._becoming_ready: asyncio.Task[None] | None = None
        self._sending_resume: asyncio.Task[None] | None = None
        self._migration_task: asyncio.Task[None] | None = None
        self._migration_ready = False
        self._prepared_total = 0
        """Last batch that the runner has made as a migration's target."""
        self._departure: asyncio.Task[None] | None = None

    # ---- its life

    def start(self) -> None:
        self._host.counters.recoveries += self.record.assignment.recovery
        self._life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        slot = self.record
        self._spawn(self._report_start_stages())
        try:
            child = await self._start()
            self._spawn(self.durable.keep_up())
            self._spawn(self._watch())
            if self._host.runner_memory:
                watch = MemoryWatch(slot, self.durable, self.lose, self._spawn)
                self._spawn(watch.run(child.pid, self._host.runner_memory))
            status = await asyncio.shield(child.exited)
            if not self._stopping and slot.phase != coordinator_pb2.FAILED:
                closed = descriptors_closed(status, slot.name)
                if closed is not None:
                    self.fail(detail_of(closed), lost=False)
                else:
                    self.lose(child.why_killed or how_it_ended(status, slot.progress_page), child.last_stack)
        except asyncio.CancelledError:
            raise
        except PenstockError as error:
            self.fail(detail_of(error), lost=isinstance(error, (WorkerLostError, *COORDINATOR_ERRORS)))
        except Exception as error:
            slot.log.exception("%s: the slot could not be started", slot.name)
            self.fail(detail_of(error), lost=True)

    async def _start(self) -> Child:
        host, slot, a = self._host, self.record, self.record.assignment
        for name in filter(None, (a.resume.blob, a.loader.arguments_blob)):
            os.close(await host.blobs.descriptor(name))  # fetched before the turn begins
        self._turn = turn = host.starts.join(urgent=a.recovery)
        try:
            await turn.came
            self._awaits_fork_server = True
            fork_server = await host.fork_server.get()
            self._awaits_fork_server = False
            child = slot.child = await fork_server.fork(
                "runner", slot.name, slot.progress_page, self._on_message, about_slot(a)
            )
        except BaseException:
            turn.end()
            raise
        child.sends_descriptors, child.most_bytes = "rings", host.slot_bytes // 4
        child.exited.add_done_callback(lambda _: turn.end())
        self._spawn(turn.end_when_idle(child.pid))
        await send_assignment(host.blobs, child, a)
        begins = a.recovery and await self._fetch_restart_points(child)
        if a.resume.blob and (begins or not a.recovery):
            await self._send_resume(child)
        if begins:
            await child.send("begins")
        await child.send("go")
        return child

    async def _send_resume(self, child: Child) -> None:
        while child.reads_late:  # only what can be sent at once takes a descriptor
            await asyncio.sleep(LOOK_S)
        await child.send("resume", fds=[await self._host.blobs.descriptor(self.record.assignment.resume.blob)])

    async def _report_start_stages(self) -> None:
        while self.record.phase == coordinator_pb2.STARTING:
            await asyncio.sleep(STAGE_S)
            self.record.progress_page.refresh()
            if self._start_stage != self._stage_reported:
                self._host.slot_changed()

    @property
    def _start_stage(self) -> coordinator_pb2.StartStage.ValueType:
        slot = self.record
        if slot.phase != coordinator_pb2.STARTING:
            return coordinator_pb2.START_STAGE_UNSPECIFIED
        if slot.child is None:
            return coordinator_pb2.FORK_SERVER if self._awaits_fork_server else coordinator_pb2.START_STAGE_UNSPECIFIED
        return _STAGES.get(slot.progress_page.activity[0], coordinator_pb2.RUNNER)

    async def _fetch_restart_points(self, child: Child) -> bool:
        """Send durable points to the runner. Return True if the launch's first has no data, so that it must be made
        again."""
        store = self.record.store
        request = coordinator_pb2.GetSnapshotsRequest(**about_slot(self.record.assignment))
        kept = await self._host.coordinator.get_snapshots(request)
        known = {(point.epoch, point.total) for point in store}
        firsts = [[first.epoch, first.began, first.digest] for header, _ in kept for first in header.firsts]
        if firsts:
            await child.send("firsts", firsts=firsts)
        for header, data in kept:
            if (header.epoch, header.total) in known or not header.size:
                continue
            await child.send("point", data)
            place = {name: getattr(header, name) for name in HEADER}
            point = StoredSnapshot(**place, data=data, durable=True, inherited=True)
            self.record.from_before.add(point.position)
            store.add(point, 0)
        return not all(header.size for header, _ in kept)

    async def stop(self) -> None:
        slot = self.record
        self._stopping = True
        self._end_turn()
        self.lanes.end()
        under_way = [*self._tasks, *([self._life] if self._life is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if slot.child is not None:
            await slot.child.stop(STOP_GRACE_S)
            try:
                await asyncio.wait_for(asyncio.shield(slot.child.exited), KILL_S)
            except TimeoutError:
                slot.log.error("%s: killed process %d has not ended after %g s", slot.name, slot.child.pid, KILL_S)
        self.lanes.finished.close()
        slot.progress_page.close()

    def fail(self, error: records_pb2.ErrorDetail, *, lost: bool) -> None:
        """End the slot. lost: another worker continues it; otherwise the training job gets the error."""
        slot = self.record
        if self._stopping or slot.phase == coordinator_pb2.FAILED:
            return
        slot.phase, slot.error, slot.lost = coordinator_pb2.FAILED, error, lost
        self._end_turn()
        self.lanes.end()
        self._host.counters.losses += lost
        self._log_failure(error.message, error.remote_traceback if lost else "")
        if slot.child is not None:
            slot.child.kill()
        self._host.slot_changed()

    def _log_failure(self, message: str, stack: str = "") -> None:
        """In embedded mode at a lower level, because the training job shows the same error."""
        level = logging.INFO if self._host.embedded else logging.WARNING
        self.record.log.log(level, "%s: %.4000s%s", self.record.name, message, stack and f"\n{stack}")

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()

    def lose(self, how: str, stack: str = "") -> None:
        """Report the runner lost, so that another continues. how: end of a sentence about "the runner". stack: at its
        crash."""
        page = self.record.progress_page
        making = page.making
        if making is not None:
            self._making = records_pb2.Skip(epoch=making[0], total=page.total, count=making[1])
        detail = records_pb2.ErrorDetail(name="WorkerLostError", message=f"the runner {how}", remote_traceback=stack)
        self.fail(detail, lost=True)

    # ---- its migration

    def assigned(self, assignment: records_pb2.WorkerAssignment) -> None:
        """Begin or stop preparing a move of the slot, as its newest assignment says."""
        if not assignment.prepare_migration:  # a later migration makes its own restart points durable
            self._migration_task, self._departure, self._migration_ready = None, None, False
            self._prepared_total = 0
        elif self._migration_task is None and assignment.is_target:
            self._migration_task = self._spawn(self._prepare_as_target(assignment))
        elif self._migration_task is None:
            self._migration_task = self._spawn(self._prepare_migration())
        elif assignment.migration_total and not assignment.is_target and self._departure is None:
            self._departure = self._spawn(self._await_delivery(assignment.migration_total))

    async def _prepare_migration(self) -> None:
        await self._take_snapshot()
        await self.durable.prepare_migration()
        if self._migration_task is asyncio.current_task():
            self._migration_ready = True
            self._host.slot_changed()

    async def _take_snapshot(self) -> None:
        slot = self.record
        saves = slot.capabilities.state_methods and not by_own_methods(slot.capabilities)
        if slot.child is None or not saves or slot.unsaved is not None:
            return
        newest, until = self._newest_total, time.monotonic() + FRESH_S
        await slot.child.send("snapshot")
        while self._newest_total == newest and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    @property
    def _newest_total(self) -> int:
        return max((point.total for point in self.record.store), default=-1)

    async def _await_delivery(self, total: int) -> None:
        page = self.record.progress_page
        while self._departure is asyncio.current_task():
            page.refresh()
            if page.delivered >= total:
                self._host.slot_changed()
                return
            await asyncio.sleep(LOOK_S)

    async def _prepare_as_target(self, assignment: records_pb2.WorkerAssignment) -> None:
        await self.record.ready.wait()
        child = self.record.child
        assert child is not None
        with contextlib.suppress(*COORDINATOR_ERRORS):
            await self._fetch_restart_points(child)
        total, loop_waits = assignment.migration_total, assignment.loop_waits
        labels = {str(known.epoch): known.label for known in assignment.migration_labels}
        await child.send("prepare", total=total, loop_waits=loop_waits, labels=labels)

    # ---- its health

    async def _watch(self) -> None:
        """Report a runner that is long in one activity; if it only waits for others, only when a signal has stopped
        it."""
        slot, page = self.record, self.record.progress_page
        after = hang_s(slot.assignment.loader.options.timeout_s)
        while True:
            await asyncio.sleep(min(5.0, max(LOOK_S, after / LOOKS)))
            page.refresh()
            now, (activity, for_s) = time.monotonic(), page.activity
            lasts = self._stall.look(now, activity, for_s, page.total)
            if lasts < after or slot.child is None or slot.phase == coordinator_pb2.FAILED:
                self._report_stall("", "")
            elif not self._doing:
                pid = self._working(slot.child)
                state = state_of(pid)
                stopped = state in ("T", "t")
                if stopped or not self._stall.idle:
                    doing = self._stall.text(now, time.time())
                    stack = await slot.child.stack(pid)
                    self._report_stall(f"stopped by a signal (state {state}), {doing}" if stopped else doing, stack)

    def _working(self, runner: Child) -> int:
        """Return the process that runs user code: the runner, or its child for the epoch."""
        pid = self.record.progress_page.process
        return pid if pid and pid in family(runner.pid) else runner.pid

    def _report_stall(self, doing: str, stack: str) -> None:
        slot = self.record
        if doing:
            slot.log.warning("slow worker: %s on worker %s is %s\n%s", slot.name, self._host.name, doing, stack)
        if doing != self._doing:
            self._doing, self._stack = doing, stack
            self._host.slot_changed()

    def report(self) -> coordinator_pb2.SlotReport:
        record, page = self.record, self.record.progress_page
        page.refresh()
        if self._rates.due(now := time.monotonic()):
            spent = used_by(record.child.pid) if record.child is not None else NOTHING
            self._rates.look(now, page.total, page.working_s, spent)
        self._stage_reported = self._start_stage
        position = self._turn.position if self._turn is not None else 0
        # Not known before the first batch is sent: True avoids a warning until then.
        record.capabilities.looked_at_assignment = page.looked or not record.begun.is_set()
        record.capabilities.worker_info = records_pb2.WorkerInfo.ValueType(page.worker_info)
        return coordinator_pb2.SlotReport(
            **about_slot(record.assignment),
            phase=record.phase,
            capabilities=record.capabilities,
            error=record.error,
            lost=record.lost,
            produced=self._prepared_total or page.total,
            delivered=page.delivered,
            batches_per_s=self._rates.batches_per_s,
            batch_s=self._rates.batch_s,
            batch_cpu_s=self._rates.batch_cpu_s,
            batch_delay_s=self._rates.batch_delay_s,
            worked_s=page.working_s,
            migrated=self._migration_ready,
            doing=self._doing,
            stack=self._stack,
            recycle=record.recycle,
            outgrown=record.outgrown,
            making=self._making,
            start_queue_position=position,
            start_queue_length=len(self._host.starts) if position else 0,
            start_stage=self._stage_reported,
            firsts=self._firsts(),
        )

    def _firsts(self) -> Iterator[records_pb2.FirstBatch]:
        """Yield first batches of epochs, if a next runner is known to come and a second loader may be made to compare
        them."""
        slot = self.record
        leaves = slot.phase == coordinator_pb2.FAILED and (slot.lost or slot.recycle)
        if (leaves or self._migration_ready) and slot.is_savable:
            for epoch, began, digest in slot.progress_page.firsts()[-EPOCHS_AHEAD - 1 :]:
                yield records_pb2.FirstBatch(epoch=epoch, began=began, digest=digest)

    # ---- messages of the runner

    def _on_message(self, message: ControlMessage) -> None:
        if message.kind == "rings":
            self.lanes.finished.learn_rings(message)
        elif self._stopping:
            pass
        elif message.kind == "structure":
            self.lanes.finished.learn_structure(message)
        elif message.kind == "point":  # no change of the report: a heartbeat would cost four times the snapshot
            self._keep(message)
        else:
            self._learn(message)
            self._host.slot_changed()

    def _keep(self, message: ControlMessage) -> None:
        epoch, delivered, total, samples, step = counts(message, "epoch", "delivered", "total", "samples", "step")
        fields, store = message.fields, self.record.store
        point = StoredSnapshot(epoch, delivered, total, samples, bool(fields["epoch_start"]), step, message.payload)
        again = any(kept.begins and (kept.epoch, kept.total) == (epoch, total) for kept in store)
        point.begins = bool(fields["begins"]) or again
        point.spent_s = float(fields["spent_s"])
        self._host.counters.snapshots += 1
        store.add(point, *self._oldest_wanted())

    def _learn(self, message: ControlMessage) -> None:
        slot, fields = self.record, message.fields
        if message.kind == "ready":
            if len(message.payload) > MAX_REPORT_BYTES:
                raise invalid_message(
                    f"a loader's report must have at most {MAX_REPORT_BYTES} bytes, got {len(message.payload)}"
                )
            slot.capabilities.ParseFromString(message.payload)
            if self._becoming_ready is None:
                self._becoming_ready = self._spawn(self._become_ready())
        elif message.kind == "unsaved":
            is_new, slot.unsaved = slot.unsaved is None, cut(records_pb2.ErrorDetail(**fields["error"]))
            if is_new:
                slot.log.warning("%s: no snapshot of the loader is taken: %.4000s", slot.name, slot.unsaved.message)
        elif message.kind == "unfit":
            slot.capabilities.not_used = str(fields["what"])[:MAX_UNSAVED_TEXT]
        elif message.kind == "begun":
            slot.progress_page.refresh()
            if (answer := slot.progress_page.worker_info) and not slot.begun.is_set():
                slot.log.info("%s: %s", slot.name, WORKER_INFO_TEXTS[answer])
            slot.begun.set()
        elif message.kind == "prepared":
            (self._prepared_total,) = counts(message, "total")
            self._migration_ready = True
        elif message.kind == "left":
            epoch, total = counts(message, "epoch", "total")
            slot.store.forget_after(epoch, total)
            slot.abandoned[epoch] = total
            if len(slot.abandoned) > MOST_ABANDONED:
                del slot.abandoned[min(slot.abandoned)]
        elif message.kind == "wants_resume":
            assert slot.child is not None
            if not slot.assignment.resume.blob:
                raise invalid_message("a runner wants a state to resume from, and there is none")
            if self._sending_resume is None or self._sending_resume.done():
                self._sending_resume = self._spawn(self._send_resume(slot.child))
        elif message.kind == "broken":
            is_new, slot.broken = slot.broken is None, cut(records_pb2.ErrorDetail(**fields["error"]))
            if is_new:
                self._log_failure(slot.broken.message)
        elif message.kind == "failed":
            self.fail(cut(records_pb2.ErrorDetail(**fields["error"])), lost=False)

    async def _become_ready(self) -> None:
        """Make the first restart point durable before batches can be fetched, so that each delivered one can be made
        again."""
        slot = self.record
        for point in list(slot.store):
            if not point.durable:
                await self.durable.make(point, waits_for_disk=slot.assignment.recovery)
            refused = self.durable.refused
            if refused and not slot.assignment.recovery:  # a recovery has an older snapshot of the slot
                what = "the coordinator cannot keep the loader's first snapshot, without which no recovery is possible"
                self.fail(detail_of(JournalError(f"{slot.name}: {what}: {refused}")), lost=False)
        if slot.phase == coordinator_pb2.STARTING:
            slot.phase = coordinator_pb2.READY
            slot.ready.set()
            self._end_turn()
            self._host.slot_changed()

    def _oldest_wanted(self) -> tuple[int, int]:
        """Return the earliest position that may be requested, (batches over all epochs, epoch), by the retention window
        and the slot's share. The epoch is at most `retention_steps` back, as the loop takes at least one batch in
        each."""
        a, page = self.record.assignment, self.record.progress_page
        page.refresh()
        steps = a.loader.options.retention_steps
        total = max(0, page.delivered - math.ceil(steps / a.num_workers_per_box) - 1)
        entry = page.entry(total)
        epoch = a.start.epoch if entry is None else entry.epoch
        return total, max(epoch, page.begun - EPOCHS_AHEAD - steps - 1)

    # ---- for the daemon

    @property
    def runner(self) -> int:
        child = self.record.child
        return 0 if child is None or child.exited.done() else child.pid

    async def answer(self, request: coordinator_pb2.StateRequest) -> tuple[coordinator_pb2.StateAnswer, bytes] | None:
        """See SlotStates.answer. None also if the slot ends meanwhile."""
        answering = asyncio.ensure_future(self._states.answer(request))
        self._tasks.add(answering)
        answering.add_done_callback(self._tasks.discard)
        await asyncio.wait((answering,))
        return None if answering.cancelled() else answering.result()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            self.record.log.exception("%s: a background task failed", self.record.name)
