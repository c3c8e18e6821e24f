"""A slot on this worker: its runner, its restart points, and its reports.

A slot is a logical worker of a run with a position in the data; a child process, the runner, runs its loader. A Slot
object exists for one generation of the slot: it ends when the runner dies or the slot moves to another worker. The
daemon never runs user code; tasks that need user code (a state between snapshots) go to helper processes.
slot_states.py answers state requests, memory_watch.py watches memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Iterator
from typing import Any

from penstock.proto.errors import (
    JournalError,
    PenstockError,
    WorkerLostError,
)
from penstock.proto.rpc.channel import detail_of
from penstock.proto.rpc.wire_errors import cut
from penstock.proto.state.assignment import WORKER_INFO_TEXTS
from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2, lane_pb2, records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.helpers.replayers import DEADLINE_S, run_task, send_assignment
from penstock.worker.processes.child_processes import Child, about_slot
from penstock.worker.processes.control_channel import ControlMessage, counts, invalid_message
from penstock.worker.processes.exit_causes import descriptors_closed, how_it_ended
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.stack_dump import state_of
from penstock.worker.resources.memory_use import family
from penstock.worker.resources.processor_time import NOTHING, used_by
from penstock.worker.resources.rates import BatchRates
from penstock.worker.resources.turn_queue import QueueTurn
from penstock.worker.slots.durable_snapshots import DurableSnapshots
from penstock.worker.slots.finished_batches import FinishedBatches
from penstock.worker.slots.memory_watch import MemoryWatch
from penstock.worker.slots.slot_interfaces import COORDINATOR_ERRORS, SlotHost, key_of
from penstock.worker.slots.slot_states import SlotStates
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot
from penstock.worker.slots.stall_watch import LOOKS, Stall, hang_s
from penstock.worker.slots.waiting_lane import WaitingLane

__all__ = ["Slot"]

_log = logging.getLogger("penstock.worker")

STOP_GRACE_S = 0.5
"""Seconds that a runner may take to end after a stop request, before it is killed."""
MAX_REPORT_BYTES = 8 << 10
"""Largest size of a runner's report about its loader, in bytes. Each heartbeat carries this report."""
MAX_UNSAVED_TEXT = 1000
"""Largest length, in characters, of a text sent to the training job that says why the loader's states are not used."""
LOOK_S = 0.02
"""Seconds between two checks whether the runner has received a connection that was sent to it, or whether it has got
far enough for a migration."""
FRESH_S = 0.3
"""Longest time to wait for a snapshot that a migration's target starts from. An older one will do."""
STAGE_S = 1.5
"""Seconds between two checks of the stage of a slot's start, such as INPUT_FN. A new stage is reported to the
coordinator."""
KILL_S = 10.0
"""Seconds to wait until a killed process ends. A process that hangs in a driver or a file system does not end."""
_STAGES = {
    "input_fn": coordinator_pb2.INPUT_FN,
    "iter": coordinator_pb2.FIRST_BATCH,
    "next": coordinator_pb2.FIRST_BATCH,
    "state_dict": coordinator_pb2.RESTORE,
    "load_state_dict": coordinator_pb2.RESTORE,
    "replay": coordinator_pb2.RESTORE,
}
"""Start stage to report for each activity of a starting runner."""
_NO_ROOM = (
    "{name}: the coordinator cannot keep the loader's first snapshot, without which the slot could not be recovered: "
    "{why}"
)


class Slot:
    """Generation of a slot (a logical worker of a run) on this worker, from `start()` to `stop()`."""

    def __init__(self, host: SlotHost, assignment: records_pb2.WorkerAssignment) -> None:
        self.assignment = assignment
        self.phase = coordinator_pb2.STARTING
        self.error: records_pb2.ErrorDetail | None = None
        self.lost = False
        self.capabilities = records_pb2.LoaderCapabilities(length=-1)
        self.progress_page = ProgressPage.create()
        self.name = f"{assignment.run} box {assignment.box} slot {assignment.slot}"
        self.log = SubjectLogger(_log, **about_slot(assignment), worker=host.name)
        self.host = host
        self.store = SlotSnapshots()
        self.abandoned: dict[int, int] = {}
        """Epochs that the training loop abandoned, as the runner reported: number of the epoch -> number of the slot's
        last batch in it, counted over all epochs."""
        self.from_before: set[tuple[int, int, int, bool, int]] = set()
        """Positions (`StoredSnapshot.position`) of the restart points that earlier runners of the slot made."""
        self.states = SlotStates(self)
        self.durable = DurableSnapshots(self)
        self._child: Child | None = None
        self._stall = Stall(since=time.monotonic())
        self._doing = ""
        self._stack = ""
        self.recycle = self.outgrown = False
        """Flags about memory. `recycle`: the runner is replaced because it held too much memory. `outgrown`: it held
        too much before its second batch."""
        self._making: records_pb2.Skip | None = None
        self.unsaved: records_pb2.ErrorDetail | None = None
        self.broken: records_pb2.ErrorDetail | None = None
        self.ready = asyncio.Event()
        self._turn: QueueTurn | None = None
        self._stopping = False
        self.attached = False
        self._waiting_lane = WaitingLane(self.name)
        self._finished = FinishedBatches(self.progress_page.frame_log)
        self._passing: tuple[asyncio.Task[None], socket.socket, int] | None = None
        """Task that passes the newest connection to the runner, with the connection."""
        self._lane_unread = False
        """True if a lane's connection was sent to the runner, which may not have received the connection yet."""
        self.begun = asyncio.Event()
        self._awaits_fork_server = False
        self._stage_reported: coordinator_pb2.StartStage.ValueType = coordinator_pb2.START_STAGE_UNSPECIFIED
        self._life: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._rates = BatchRates(time.monotonic())
        self._migration_task: asyncio.Task[None] | None = None
        self._migration_ready = False
        self._prepared_total = 0
        """Number of the slot's last batch that the runner has made as a migration's target."""
        self._departure: asyncio.Task[None] | None = None
        point = assignment.start.slots
        self._first_total = point[assignment.slot].total if len(point) > assignment.slot else 0

    # ---- its life

    def start(self) -> None:
        """Start the slot's task, which runs the runner."""
        self.host.counters.recoveries += self.assignment.recovery
        self._life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Start the runner, wait until it ends, and report how it ended."""
        self.spawn(self._report_start_stages())
        try:
            await self._start()
            assert self._child is not None
            self.spawn(self.durable.keep_up())
            self.spawn(self._watch())
            if self.host.runner_memory:
                watch = MemoryWatch(self, self.durable)
                self.spawn(watch.run(self._child.pid, self.host.runner_memory))
            status = await asyncio.shield(self._child.exited)
            if not self._stopping and self.phase != coordinator_pb2.FAILED:
                closed = descriptors_closed(status, self.name)
                if closed is not None:
                    self.fail(detail_of(closed), lost=False)
                else:
                    self.lose(how_it_ended(status, self.progress_page), self._child.last_stack)
        except asyncio.CancelledError:
            raise
        except PenstockError as error:
            self.fail(detail_of(error), lost=isinstance(error, (WorkerLostError, *COORDINATOR_ERRORS)))
        except Exception as error:
            self.log.exception("%s: the slot could not be started", self.name)
            self.fail(detail_of(error), lost=True)

    async def _start(self) -> None:
        host, a = self.host, self.assignment
        for name in filter(None, (a.resume.blob, a.loader.arguments_blob)):
            os.close(await host.blobs.descriptor(name))  # fetched before the turn begins
        self._turn = turn = host.starts.join(urgent=a.recovery)
        try:
            await turn.came
            self._awaits_fork_server = True
            fork_server = await host.fork_server(a)
            self._awaits_fork_server = False
            child = self._child = await fork_server.fork(
                "runner", self.name, self.progress_page, self._on_message, about_slot(a)
            )
        except BaseException:
            turn.end()
            raise
        child.sends_descriptors = "rings"
        child.exited.add_done_callback(lambda _: turn.end())
        self.spawn(turn.end_when_idle(child.pid))
        await send_assignment(host.blobs, child, a)
        begins = a.recovery and await self._fetch_restart_points(child)
        if a.resume.blob and (begins or not a.recovery):
            await child.send("resume", fds=[await host.blobs.descriptor(a.resume.blob)])
        if begins:
            await child.send("begins")
        await child.send("go")

    async def _report_start_stages(self) -> None:
        """Report each new stage of the slot's start, checked every STAGE_S seconds. A quick start causes no report."""
        while self.phase == coordinator_pb2.STARTING:
            await asyncio.sleep(STAGE_S)
            self.progress_page.refresh()
            if self.start_stage != self._stage_reported:
                self.host.slot_changed()

    @property
    def start_stage(self) -> coordinator_pb2.StartStage.ValueType:
        """Present stage of the slot's start, as of the progress page's last `refresh`."""
        if self.phase != coordinator_pb2.STARTING:
            return coordinator_pb2.START_STAGE_UNSPECIFIED
        if self._child is None:
            return coordinator_pb2.FORK_SERVER if self._awaits_fork_server else coordinator_pb2.START_STAGE_UNSPECIFIED
        return _STAGES.get(self.progress_page.activity[0], coordinator_pb2.RUNNER)

    async def _fetch_restart_points(self, child: Child) -> bool:
        """Fetch the slot's durable restart points from the coordinator, and send them on to the runner. Return True if
        the coordinator has the first restart point of this launch without its data, so that the runner must make it
        again: see durable_snapshots.py."""
        run, attempt, box, slot, generation = key_of(self.assignment)
        kept = await self.host.coordinator.get_snapshots(
            coordinator_pb2.GetSnapshotsRequest(run=run, attempt=attempt, box=box, slot=slot, generation=generation)
        )
        known = {(point.epoch, point.total) for point in self.store}
        firsts = [[first.epoch, first.began, first.digest] for header, _ in kept for first in header.firsts]
        if firsts:
            await child.send("firsts", firsts=firsts)
        for header, data in kept:
            if (header.epoch, header.total) in known or not header.size:
                continue
            await child.send("point", data)
            point = StoredSnapshot(
                header.epoch,
                header.delivered,
                header.total,
                header.samples,
                header.epoch_start,
                header.step,
                data,
                durable=True,
                inherited=True,
            )
            self.from_before.add(point.position)
            self.store.add(point, 0)
        return not all(header.size for header, _ in kept)

    def assigned(self, assignment: records_pb2.WorkerAssignment) -> None:
        """Begin or stop preparing a move of the slot to another worker, as the coordinator's newest assignment of the
        slot says."""
        if not assignment.prepare_migration:  # a later migration makes its own restart points durable
            self._migration_task, self._departure, self._migration_ready = None, None, False
            self._prepared_total = 0
        elif self._migration_task is None and assignment.is_target:
            self._migration_task = self.spawn(self._prepare_as_target(assignment))
        elif self._migration_task is None:
            self._migration_task = self.spawn(self._prepare_migration())
        elif assignment.migration_total and not assignment.is_target and self._departure is None:
            self._departure = self.spawn(self._await_delivery(assignment.migration_total))

    async def _prepare_migration(self) -> None:
        await self._take_snapshot()
        await self.durable.prepare_migration()
        if self._migration_task is asyncio.current_task():
            self._migration_ready = True
            self.host.slot_changed()

    async def _take_snapshot(self) -> None:
        """Let the runner take a snapshot after its next batch, and wait FRESH_S seconds at most."""
        saves = self.capabilities.state_methods and not by_own_methods(self.capabilities)
        if self._child is None or not saves or self.unsaved is not None:
            return
        newest, until = self._newest_total, time.monotonic() + FRESH_S
        await self._child.send("snapshot")
        while self._newest_total == newest and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    @property
    def _newest_total(self) -> int:
        return max((point.total for point in self.store), default=-1)

    async def _await_delivery(self, total: int) -> None:
        """Report as soon as the training loop has taken the batch up to which the migration's target has replayed."""
        while self._departure is asyncio.current_task():
            self.progress_page.refresh()
            if self.progress_page.delivered >= total:
                self.host.slot_changed()
                return
            await asyncio.sleep(LOOK_S)

    async def _prepare_as_target(self, assignment: records_pb2.WorkerAssignment) -> None:
        await self.ready.wait()
        assert self._child is not None
        with contextlib.suppress(*COORDINATOR_ERRORS):
            await self._fetch_restart_points(self._child)
        total, loop_waits = assignment.migration_total, assignment.loop_waits
        labels = {str(known.epoch): known.label for known in assignment.migration_labels}
        await self._child.send("prepare", total=total, loop_waits=loop_waits, labels=labels)

    async def stop(self) -> None:
        """End the runner and all tasks of the slot."""
        self._stopping = True
        self._end_turn()
        self._waiting_lane.end()
        self._drop_passing()
        under_way = [*self._tasks, *([self._life] if self._life is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(STOP_GRACE_S)
            try:
                await asyncio.wait_for(asyncio.shield(self._child.exited), KILL_S)
            except TimeoutError:
                self.log.error(
                    "%s: process %d was killed, and has not ended after %g s; it may wait for a driver or file system",
                    *(self.name, self._child.pid, KILL_S),
                )
        self._finished.close()
        self.progress_page.close()

    def fail(self, error: records_pb2.ErrorDetail, *, lost: bool) -> None:
        """End the slot with an error. lost: True if another worker is to continue the slot; False if the training job
        is to get the error."""
        if self._stopping or self.phase == coordinator_pb2.FAILED:
            return
        self.phase, self.error, self.lost = coordinator_pb2.FAILED, error, lost
        self._end_turn()
        self._waiting_lane.end()
        self._drop_passing()
        self.host.counters.losses += lost
        self._log_failure(error.message, error.remote_traceback if lost else "")
        if self._child is not None:
            self._child.kill()
        self.host.slot_changed()

    def _log_failure(self, message: str, stack: str = "") -> None:
        """Log the reason why the slot ended. In embedded mode use a lower level, because the training job shows the
        same error on the same screen."""
        level = logging.INFO if self.host.embedded else logging.WARNING
        self.log.log(level, "%s: %.4000s%s", self.name, message, stack and f"\n{stack}")

    def _end_turn(self) -> None:
        """Give up this slot's place in the queue of starts, so that the next runner can start."""
        if self._turn is not None:
            self._turn.end()

    def lose(self, how: str, stack: str = "") -> None:
        """Report the runner lost, so that another runner continues the slot.

        how: how the runner ended, as the end of a sentence whose subject is "the runner". stack: the runner's stack
        when it crashed.
        """
        making = self.progress_page.making
        if making is not None:
            self._making = records_pb2.Skip(epoch=making[0], total=self.progress_page.total, count=making[1])
        detail = records_pb2.ErrorDetail(name="WorkerLostError", message=f"the runner {how}", remote_traceback=stack)
        self.fail(detail, lost=True)

    # ---- its health

    async def _watch(self) -> None:
        """Report a runner, with its stack, if it is in one activity for long. If it only waits for others, report it
        only if it is also stopped by a signal. Return only when cancelled."""
        after = hang_s(self.assignment.loader.options.timeout_s)
        while True:
            await asyncio.sleep(min(5.0, after / LOOKS))
            self.progress_page.refresh()
            now, (activity, for_s) = time.monotonic(), self.progress_page.activity
            lasts = self._stall.look(now, activity, for_s, self.progress_page.total)
            if lasts < after or self._child is None or self.phase == coordinator_pb2.FAILED:
                self._report_stall("", "")
            elif not self._doing:
                state = state_of(self._working)
                stopped = state in ("T", "t")
                if stopped or not self._stall.idle:
                    doing = self._stall.text(now, time.time())
                    stack = await self._child.stack(self._working)
                    self._report_stall(f"stopped by a signal (state {state}), {doing}" if stopped else doing, stack)

    @property
    def _working(self) -> int:
        """Process id of the process that runs user code: the runner, or its child that makes the present epoch."""
        assert self._child is not None
        runner, child = self._child.pid, self.progress_page.process
        return child if child and child in family(runner) else runner

    def _report_stall(self, doing: str, stack: str) -> None:
        if doing:
            self.log.warning("slow worker: %s on worker %s is %s\n%s", self.name, self.host.name, doing, stack)
        if doing != self._doing:
            self._doing, self._stack = doing, stack
            self.host.slot_changed()

    def report(self) -> coordinator_pb2.SlotReport:
        """Return the slot's report for the next heartbeat."""
        self.progress_page.refresh()
        if self._rates.due(now := time.monotonic()):
            spent = used_by(self._child.pid) if self._child is not None else NOTHING
            self._rates.look(now, self.progress_page.total, self.progress_page.working_s, spent)
        run, attempt, box, slot, generation = key_of(self.assignment)
        self._stage_reported = self.start_stage
        position = self._turn.position if self._turn is not None else 0
        # Not known before the first batch is sent: True avoids a warning until then.
        self.capabilities.looked_at_assignment = self.progress_page.looked or not self.begun.is_set()
        self.capabilities.worker_info = records_pb2.WorkerInfo.ValueType(self.progress_page.worker_info)
        return coordinator_pb2.SlotReport(
            run=run,
            attempt=attempt,
            box=box,
            slot=slot,
            generation=generation,
            phase=self.phase,
            capabilities=self.capabilities,
            error=self.error,
            lost=self.lost,
            produced=self._prepared_total or self.progress_page.total,
            delivered=self.progress_page.delivered,
            batches_per_s=self._rates.batches_per_s,
            batch_s=self._rates.batch_s,
            batch_cpu_s=self._rates.batch_cpu_s,
            batch_delay_s=self._rates.batch_delay_s,
            worked_s=self.progress_page.working_s,
            migrated=self._migration_ready,
            doing=self._doing,
            stack=self._stack,
            recycle=self.recycle,
            outgrown=self.outgrown,
            making=self._making,
            start_queue_position=position,
            start_queue_length=len(self.host.starts) if position else 0,
            start_stage=self._stage_reported,
            firsts=self._firsts(),
        )

    def _firsts(self) -> Iterator[records_pb2.FirstBatch]:
        """Yield the first batches of epochs that the runner has made, for the slot's next runner, if it is known that
        there is one. A loader of which no second instance may be made is not compared."""
        leaves = self.phase == coordinator_pb2.FAILED and (self.lost or self.recycle)
        if (leaves or self._migration_ready) and self.is_savable:
            for epoch, began, digest in self.progress_page.firsts()[-EPOCHS_AHEAD - 1 :]:
                yield records_pb2.FirstBatch(epoch=epoch, began=began, digest=digest)

    # ---- messages of the runner

    def _on_message(self, message: ControlMessage) -> None:
        if message.kind == "rings":
            self._finished.learn_rings(message)
            return
        if self._stopping:
            return
        fields = message.fields
        if message.kind == "structure":
            self._finished.learn_structure(message)
            return
        if message.kind == "point":
            epoch, delivered, total, samples, step = counts(message, "epoch", "delivered", "total", "samples", "step")
            point = StoredSnapshot(epoch, delivered, total, samples, bool(fields["epoch_start"]), step, message.payload)
            again = any(kept.begins and (kept.epoch, kept.total) == (epoch, total) for kept in self.store)
            point.begins = bool(fields["begins"]) or again
            point.spent_s = float(fields["spent_s"])
            self.host.counters.snapshots += 1
            self.store.add(point, *self._oldest_wanted())
            return  # snapshots do not change the report, and a heartbeat for each would cost four times the snapshot
        if message.kind == "ready":
            if len(message.payload) > MAX_REPORT_BYTES:
                raise invalid_message(
                    f"a runner's report about its loader must have at most {MAX_REPORT_BYTES} bytes, got "
                    f"{len(message.payload)}"
                )
            self.capabilities.ParseFromString(message.payload)
            self.spawn(self._become_ready())
        elif message.kind == "unsaved":
            self.unsaved = cut(records_pb2.ErrorDetail(**fields["error"]))
            self.log.warning("%s: no snapshot of the loader is taken: %.4000s", self.name, self.unsaved.message)
        elif message.kind == "unfit":
            self.capabilities.not_used = str(fields["what"])[:MAX_UNSAVED_TEXT]
        elif message.kind == "begun":
            self.progress_page.refresh()
            if answer := self.progress_page.worker_info:
                self.log.info("%s: %s", self.name, WORKER_INFO_TEXTS[answer])
            self.begun.set()
        elif message.kind == "prepared":
            (self._prepared_total,) = counts(message, "total")
            self._migration_ready = True
        elif message.kind == "left":
            epoch, total = counts(message, "epoch", "total")
            self.store.forget_after(epoch, total)
            self.abandoned[epoch] = total
        elif message.kind == "wants_resume":
            self.spawn(self._send_resume())
        elif message.kind == "broken":
            self.broken = cut(records_pb2.ErrorDetail(**fields["error"]))
            self._log_failure(self.broken.message)
        elif message.kind == "failed":
            self.fail(cut(records_pb2.ErrorDetail(**fields["error"])), lost=False)
        self.host.slot_changed()

    async def _send_resume(self) -> None:
        assert self._child is not None
        await self._child.send("resume", fds=[await self.host.blobs.descriptor(self.assignment.resume.blob)])

    async def _resume_blob(self) -> bytes:
        return await self.host.blobs.read(self.assignment.resume.blob)

    async def _become_ready(self) -> None:
        """Make the first restart point durable (kept by the coordinator), and only then let training jobs fetch
        batches, so that every delivered batch can be made again."""
        for point in list(self.store):
            if not point.durable:
                await self.durable.make(point)
            refused = self.durable.refused
            if refused and not self.assignment.recovery:  # a recovery has an older snapshot of the slot
                self.fail(detail_of(JournalError(_NO_ROOM.format(name=self.name, why=refused))), lost=False)
        if self.phase == coordinator_pb2.STARTING:
            self.phase = coordinator_pb2.READY
            self.ready.set()
            self._end_turn()
            self.host.slot_changed()

    # ---- lanes

    async def attach(self, sock: socket.socket, hello: lane_pb2.Hello, deadline_s: float) -> None:
        """Send the finished batches over a training job's connection, and pass it to the runner, in the background.
        Close the connection if the runner is not ready in `deadline_s` seconds.

        Raises:
            SupersededError: a newer connection has arrived, or the slot has ended.
            LaneLostError: the training job is gone.
        """
        try:
            await self._waiting_lane.wait(lambda: self._until_ready(deadline_s))
        except TimeoutError:
            sock.close()
            return
        assert self._child is not None
        self._drop_passing()
        consumer = self._finished.announce()
        try:
            self._child.drain()  # of new rings and structures
            served = self._finished.send(sock, hello)
        except BaseException:
            self._finished.pass_on(consumer)
            raise
        self.attached = True
        self._passing = self.spawn(self._pass_on(self._child, sock, hello, served, consumer)), sock, consumer

    async def _until_ready(self, deadline_s: float) -> None:
        async with asyncio.timeout(deadline_s):  # not wait_for, which may lose a cancellation
            await self.ready.wait()
        assert self._child is not None
        if self.assignment.is_target and not self.attached:  # the slot's previous runner continued until now
            with contextlib.suppress(*COORDINATOR_ERRORS):  # on an error, start from the snapshots fetched before
                async with asyncio.timeout(deadline_s):
                    await self._fetch_restart_points(self._child)

    async def _pass_on(
        self, child: Child, sock: socket.socket, hello: lane_pb2.Hello, served: dict[str, Any], consumer: int
    ) -> None:
        """Pass a connection to the runner, once it has received the one before."""
        while self._lane_unread and child.reads_late:  # user code may keep the runner busy for any time
            await asyncio.sleep(LOOK_S)
        self._lane_unread, self._passing = True, None
        try:
            await child.send("attach", hello.SerializeToString(), [sock.detach()], **served)
        finally:
            self._finished.pass_on(consumer)

    def _drop_passing(self) -> None:
        """Close a connection that was not passed to the runner yet."""
        if self._passing is not None:
            task, sock, consumer = self._passing
            self._passing = None
            task.cancel()
            sock.close()
            self._finished.pass_on(consumer)

    # ---- durable snapshots

    @property
    def is_savable(self) -> bool:
        """True if a second instance of the slot's loader may be made and replayed: the loader has state methods, or
        `replay=True` was given. A second instance of any other loader may take data from the stream, for example from a
        queue."""
        return self.capabilities.state_methods > 0 or self.assignment.loader.options.replay_without_state

    def _oldest_wanted(self) -> tuple[int, int]:
        """Return the earliest position of the slot for which a state may still be requested: the number of batches over
        all epochs (`total`), and the epoch.

        Both follow from the retention window (`retention_steps` training steps) and the slot's share of its batches.
        The epoch is at most `retention_steps` epochs back, because the training loop takes at least one batch in each
        epoch.
        """
        progress_page = self.progress_page
        progress_page.refresh()
        steps = self.assignment.loader.options.retention_steps
        total = max(0, progress_page.delivered - math.ceil(steps / self.assignment.num_workers_per_box) - 1)
        entry = progress_page.entry(total)
        epoch = self.assignment.start.epoch if entry is None else entry.epoch
        return total, max(epoch, progress_page.begun - EPOCHS_AHEAD - steps - 1)

    def step_of(self, total: int) -> int:
        """Return the training step in which the box (data-parallel rank) got the slot's batch `total`, provided that
        all slots of the box still had batches in the epoch."""
        point = self.assignment.start
        turns = list(point.live)
        ahead = (turns.index(self.assignment.slot) - point.cursor) % len(turns) if self.assignment.slot in turns else 0
        return point.step + ahead + 1 + (total - self._first_total - 1) * len(turns)

    @property
    def runner(self) -> int:
        """Process id of the slot's runner; 0 without a runner."""
        child = self._child
        return 0 if child is None or child.exited.done() else child.pid

    @property
    def runner_gone(self) -> bool:
        """True once the slot's runner has ended."""
        return self._child is not None and self._child.exited.done()

    def drain(self) -> None:
        """Process all messages that the runner has sent so far."""
        if self._child is not None:
            self._child.drain()

    async def answer(self, request: coordinator_pb2.StateRequest) -> tuple[coordinator_pb2.StateAnswer, bytes] | None:
        """Answer a request of the coordinator for the slot's state; see SlotStates.answer. Return None also if the slot
        ends during the call."""
        answering = asyncio.ensure_future(self.states.answer(request))
        self._tasks.add(answering)
        answering.add_done_callback(self._tasks.discard)
        await asyncio.wait((answering,))
        return None if answering.cancelled() else answering.result()

    async def helper(
        self, points: list[bytes], task: str, deadline_s: float = DEADLINE_S, **fields: Any
    ) -> ControlMessage:
        """Run a task with the slot's loader in a helper process, and return the answer; see run_task in
        replayers.py."""
        begins = task == "mixture" or (task == "state" and by_own_methods(self.capabilities))
        if begins and self.assignment.resume.blob:
            points = [*points, await self._resume_blob()]
        return await run_task(
            self.host, self.assignment, self.name, self.progress_page, points, task, deadline_s, **fields
        )

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(_logged(work, self))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _logged(work: Awaitable[None], slot: Slot) -> None:
    try:
        await work
    except Exception:
        slot.log.exception("%s: a background task failed", slot.name)
