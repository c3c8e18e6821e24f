"""The training job: one process for each box, and the launcher that starts them again when one of them is gone.

A box does what penstock.client does: it opens its place (the same call again while the coordinator is away), watches,
takes batches from whoever its views name, saves, closes. Each batch it is handed, and each state, is compared with the
reference. A launch whose member fails is killed as a whole and started again under the next attempt key, from the last
saved state if there is one; sometimes the old processes are not found and live on, and must be fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from simulated.network import Network
from simulated.reference import BoxPlan, RunPlan
from simulated.truth import Truth
from simulated.virtual import Process, World
from simulated.worker import AWAY, CALL_S, HOLD_S, Take

from penstock.client.stream.box_progress import EpochStarts
from penstock.proto.errors import AuthenticationError, BoxTakenError, DeadlineError, PenstockError
from penstock.proto.rpc.bounds.reply_parts import StateParts, blob_name
from penstock.proto.rpc.calls import FetchedState, blob_parts
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Job"]

REACH_S = 20.0
"""A coordinator that is away for longer is given up when opening."""
LANE_S = 2.0
STATE_S = 20.0
RETRY_S = 0.3
IMPORT_S = 0.05
"""Seconds from a process's start to its first call, shorter than any pause between two launches."""
PEER_S = 30.0
"""Seconds that a collective waits for a lost peer."""


class Box:
    """Process of one box in one launch."""

    def __init__(self, job: Job, plan: BoxPlan, launch: int, start: Position | None) -> None:
        self.job = job
        self.plan = plan
        self.launch = launch
        self.start = start
        """Position to resume from; None: the beginning."""
        self.process = job.world.process(f"{job.plan.name}.{plan.number}#{launch}")
        self.outcome = ""
        """ "" while it runs, then "done" or why it is not."""
        self.ended_at = 0.0
        self.doing = "opening"
        self.attempt = 0
        self.taken = 0
        """Step that the other boxes may go by."""
        self.asks_since = 0.0
        """Time when its present call for a state was sent; 0 = there is none."""
        self._record: Position | None = None
        self._abandoned: list[tuple[int, int]] = []
        self._waiting_for = 0
        self._waited_s = [0.0] * job.plan.workers
        self._pass_ended = False
        self._lease_s = 0.0
        self._commit_mark = b""
        self._epoch_starts = EpochStarts()
        self._views: dict[int, pb.SlotView] = {}
        self._lost_lanes: dict[int, tuple[int, int]] = {}
        """Slot -> generation and tries in vain, of workers that cannot be reached."""
        self._fence: pb.MixtureFence | None = None
        self._fence_answer = ("", 0)
        self._taking = 0
        """Step that it has taken last, or is taking."""
        self._changed = asyncio.Event()
        self._telling: dict[int, asyncio.Task[None]] = {}
        """Slot -> the newest task that tells it of an epoch."""
        self.process.on_death.append(lambda: self._end("killed"))
        self.process.spawn(self._run())

    def _end(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome, self.ended_at = outcome, self.job.world.now
            self.job.world.note(self.process.name, f"ends: {outcome}")
            self.job.member_ended()

    async def _call(self, method: str, request: Any, deadline_s: float = CALL_S) -> Any:
        return await self.job.network.call(self.process, "coordinator", method, request, deadline_s)

    # ---- its life

    async def _run(self) -> None:
        try:
            await self._open()
            watch = self.process.spawn(self._watch())
            await self._train()
            if self.job.barrier:
                self.doing = "waiting for the other boxes to end"
                self.job.finished[self.launch].add(self.plan.number)
                while len(self.job.finished[self.launch]) < len(self.job.plan.boxes):
                    self._require_peers()
                    await asyncio.sleep(RETRY_S)
            self.doing = "closing"
            watch.cancel()
            await self._close()
        except PenstockError as error:
            if self.job.keyed and isinstance(error, BoxTakenError):
                self.job.world.violated("a new launch gets its place", error.message)
            self.doing = "ended"
            if self.attempt:
                await self._close()
            self._end(f"{type(error).__name__}: {error.message}")
            self.process.kill()
            return
        self._end("done")
        self.process.kill()

    async def _open(self) -> None:
        job, plan = self.job, self.plan
        request = pb.OpenRunRequest(job="job", ordinal=job.plan.ordinal, box=plan.number, host_id=f"host-{plan.number}")
        request.num_boxes, request.num_workers_per_box = len(job.plan.boxes), job.plan.workers
        request.client_id = self.process.name
        request.attempt_key = f"k{self.launch}" if job.keyed else ""
        request.loader.input_fn = "m:f"
        request.loader.options.retention_steps = job.plan.retention
        if self.start is not None:
            request.start.CopyFrom(self.start.to_proto())
        started, until = job.world.now, job.world.now + REACH_S
        while True:
            request.process_age_s = job.world.now - started + IMPORT_S
            try:
                if self.start is not None:
                    data = f"state at {job.saved_step}".encode()
                    await self._call("PutBlob", list(blob_parts(data, job.plan.name)))
                    request.resume.blob, request.resume.same_topology = blob_name(data), True
                reply = await self._call("OpenRun", request)
                break
            except (*AWAY, BoxTakenError) as error:
                if job.world.now > until or (job.keyed and "is held by" in str(error)):
                    raise
                await asyncio.sleep(RETRY_S)
        self.attempt = reply.attempt
        job.truth.opened(job.plan.name, reply.attempt, plan.number, request.client_id)

    def _progress(self, seen: int, hold_s: float) -> pb.WatchRunRequest:
        request = pb.WatchRunRequest(run=self.job.plan.name, attempt=self.attempt, box=self.plan.number)
        request.client_id, request.seen_version, request.hold_s = self.process.name, seen, hold_s
        if self._record is not None:
            request.delivered.CopyFrom(self._record.to_proto())
        request.fence_key, request.fence_taken = self._fence_answer
        request.lease_s, request.commit_mark = self._lease_s, self._commit_mark
        request.waiting_for, request.epoch_ended = self._waiting_for, self._pass_ended
        request.waited_s = sum(self._waited_s)
        request.waited_by_slot_s.extend(self._waited_s)
        for epoch, step in self._abandoned:
            request.abandoned.add(epoch=epoch, step=step)
        for slot, (generation, tries) in self._lost_lanes.items():
            if tries > 1:
                request.unreachable.add(slot=slot, generation=generation, why="cut off")
        self._epoch_starts.put_into(request)
        return request

    async def _watch(self) -> None:
        seen, backoff, hold_s = 0, 0.1, HOLD_S
        while True:
            try:
                request = self._progress(seen, hold_s)
                reply = await self._call("WatchRun", request, hold_s + CALL_S)
            except AWAY:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, 2.0)
                continue
            except PenstockError as error:
                self._end(f"{type(error).__name__}: {error.message}")
                self.process.kill()
                return
            self._epoch_starts.answered(request, reply)
            backoff, hold_s, self._lease_s = 0.1, reply.heartbeat_s, reply.lease_s
            self._commit_mark = reply.commit_mark
            if seen != reply.version:
                seen = reply.version
                self.job.truth.viewed(self.job.plan.name, self.attempt, self.plan.number, reply.slots)
                self._views = {view.slot: view for view in reply.slots}
                self._fence = reply.fence if reply.HasField("fence") else None
                if self._fence is not None and self._fence.key != self._fence_answer[0]:
                    self._fence_answer = self._fence.key, self._taking
                self._changed.set()
                self._changed = asyncio.Event()

    async def _report(self) -> None:
        while True:
            try:
                await self._call("WatchRun", self._progress(0, 0.0))
                return
            except AWAY:
                await asyncio.sleep(RETRY_S)

    def _open_epoch(self, at: Position) -> None:
        """All slots may begin it, and drop what they have of an earlier one."""
        for slot in range(self.job.plan.workers):
            before = self._telling.get(slot)
            self._telling[slot] = self.process.spawn(self._tell(slot, at.epoch, at.total[slot], before))

    async def _tell(self, slot: int, epoch: int, total: int, before: asyncio.Task[None] | None) -> None:
        """A slot that cannot be told now is told once it is ready, and all epochs in their order: a lane's hello names
        those that were left before it, and the client opens the lane of each slot as soon as there is one."""
        if before is not None:
            await asyncio.wait((before,))
        while True:
            view = self._views.get(slot)
            if view is not None and view.phase == pb.FAILED:
                return
            if view is None or not view.worker or view.phase != pb.READY:
                await self._view_change()
                continue
            try:
                await self.job.network.call(
                    self.process, view.worker, "Open", self._wish(view, epoch, 0, total), LANE_S
                )
                return
            except DeadlineError:
                continue
            except PenstockError:
                await self._view_change()  # it moves

    def _wish(self, view: pb.SlotView, epoch: int, delivered: int, total: int) -> Take:
        key = (self.job.plan.name, self.attempt, self.plan.number, view.slot, view.generation)
        return Take(key, view.ticket, epoch, delivered, total)

    async def _view_change(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    # ---- training

    async def _train(self) -> None:
        plan = self.plan
        at = Position.start(self.job.plan.workers) if self.start is None else self.start.copy()
        self.taken = at.step
        if at.step >= plan.steps:  # it had come to its end before the others
            self._pass_ended = True
            await self._report()
        while at.step < plan.steps:
            if at.step in plan.abandoned and any(at.delivered):
                self._abandoned.append((at.epoch, at.step))
                at.abandon_epoch()
                self._epoch_starts.add(at)
                self._open_epoch(at)
                await self._report()  # or a state asked for by another box would take the epoch for going on
            if not await self._take(at):
                if at.exhaust():
                    self._epoch_starts.add(at)
                    self._open_epoch(at)
                continue
            at.deliver()
            self._record = at.copy()
            await asyncio.sleep(self.job.plan.step_s)
            if at.step == plan.steps:
                self._pass_ended = True
                await self._report()  # boxes that go on ask for states of steps that this one does not take
            self.taken = at.step
            self.job.stepped()
            if self.job.plan.collective:
                self.doing = f"step {at.step}: in a collective with the other boxes"
                while not self.job.all_at(self.launch, at.step):
                    self._require_peers()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PEER_S):
                            await self.job.next_step(self.process)
            if at.step in plan.saves:
                await self._save(at.step)

    def _require_peers(self) -> None:
        """A collective whose peer is gone ends with an error after a while, as a library's does. Without that, a box
        that was left behind alone, and opens the run once the others have ended, would wait in it for ever: nobody
        opens another attempt that would fence it."""
        job = self.job
        ends = [box.ended_at for box in job.boxes if box.launch == self.launch and box.outcome not in ("", "done")]
        if ends and job.world.now - min(ends) > PEER_S:
            raise PenstockError(f"the collective has lost a box {PEER_S:g} s ago")

    async def _take(self, at: Position) -> bool:
        """The batch of this turn; False if the epoch has ended for its slot."""
        job, slot, since = self.job, at.turn, self.job.world.now
        self._waiting_for = slot + 1
        where = (job.plan.name, self.attempt, self.plan.number, slot)
        if self._fence is None or at.step + 1 < self._fence.step:
            self._taking = at.step + 1
        while True:
            if self._taking <= at.step:
                self.doing = f"step {at.step + 1}: waiting at a fence"
                await self._view_change()
                if self._fence is None or at.step + 1 < self._fence.step:
                    self._taking = at.step + 1
                continue
            view = self._views.get(slot)
            if view is None or view.phase not in (pb.READY, pb.FAILED) or not view.worker:
                if view is not None and view.phase == pb.FAILED:
                    raise PenstockError(f"slot {slot} failed: {view.error.message}")
                note = "no view yet" if view is None else f"{pb.SlotPhase.Name(view.phase)} {view.note}"
                self.doing = f"step {at.step + 1}: waiting for slot {slot}: {note}"
                await self._view_change()
                continue
            wish = self._wish(view, at.epoch, at.delivered[slot], at.total[slot])
            self.doing = f"step {at.step + 1}: taking from slot {slot} generation {view.generation} on {view.worker}"
            try:
                batch = await job.network.call(self.process, view.worker, "Take", wish, LANE_S)
            except AuthenticationError as error:
                job.world.violated("a ticket opens its lane", error.message)
            except PenstockError as error:
                if view.phase == pb.FAILED:
                    raise PenstockError(f"slot {slot} failed: {view.error.message}") from error
                if isinstance(error, AWAY):
                    generation, tries = self._lost_lanes.get(slot, (0, 0))
                    self._lost_lanes[slot] = view.generation, 1 + tries * (generation == view.generation)
                await self._view_change()
                continue
            self._lost_lanes.pop(slot, None)
            job.truth.delivered(where, view.generation, self.plan, at.step + 1, batch)
            self._waiting_for = 0
            self._waited_s[slot] += job.world.now - since
            return batch is not None

    # ---- saving, leaving

    async def _save(self, step: int) -> None:
        job, began = self.job, self.job.world.now
        self.doing = f"saving at step {step}"
        request = pb.FetchStateRequest(run=job.plan.name, attempt=self.attempt, step=step)
        until = began + STATE_S
        while True:
            request.deadline_s = max(RETRY_S, until - job.world.now)
            request.progress.CopyFrom(self._progress(0, 0.0))
            self.asks_since = job.world.now
            try:
                parts = await self._call("FetchState", request, request.deadline_s + CALL_S)
                break
            except PenstockError as error:
                if isinstance(error, AWAY) and job.world.now < until:
                    await asyncio.sleep(RETRY_S)
                    continue
                held_up = {box.plan.number for box in job.members if 0 < box.asks_since < job.truth.healed_at}
                job.truth.not_saved(job.plan, step, error, began, held_up)
                return
            finally:
                self.asks_since = 0.0
        gathered = StateParts()
        for part in parts:
            gathered.add(part)
        state = FetchedState(gathered.records(), gathered.positions)
        job.truth.saved(job.plan, step, state)
        if step > job.saved_step:
            job.saved_step = step
            job.saved = {box: Position.from_proto(at) for box, at in state.positions.items()}

    async def _close(self) -> None:
        request = pb.CloseRunRequest(run=self.job.plan.name, attempt=self.attempt, box=self.plan.number)
        request.client_id = self.process.name
        request.progress.CopyFrom(self._progress(0, 0.0))
        try:
            await self._call("CloseRun", request, 5.0)
        except PenstockError:
            return
        self.job.truth.closed(self.job.plan.name, self.attempt, self.plan.number)


@dataclass
class Job:
    """A run and its launches."""

    world: World
    network: Network
    truth: Truth
    plan: RunPlan
    keyed: bool
    """Launches carry an attempt key."""
    barrier: bool
    """Boxes that have taken their steps wait for the others before they close."""
    boxes: list[Box] = field(default_factory=list)
    """Boxes of all launches."""
    launches: int = 0
    saved_step: int = 0
    saved: dict[int, Position] = field(default_factory=dict)
    finished: dict[int, set[int]] = field(default_factory=dict)
    done: bool = False
    """All boxes of the present launch have come to their end."""
    over: bool = False
    """Set once all boxes have ended, those of old launches too."""
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _in_collective: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def members(self) -> list[Box]:
        """Return the boxes of the present launch."""
        return [box for box in self.boxes if box.launch == self.launches]

    def all_at(self, launch: int, step: int) -> bool:
        """All boxes of a launch have taken this step, or their last one."""
        boxes = [box for box in self.boxes if box.launch == launch]
        return len(boxes) == len(self.plan.boxes) and all(box.taken >= min(step, box.plan.steps) for box in boxes)

    def stepped(self) -> None:
        waiting, self._in_collective = self._in_collective, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def next_step(self, process: Process) -> None:
        """Wait until some box has taken a step. (An asyncio.Event belongs to one process; this is between several.)"""
        future: asyncio.Future[None] = process.create_future()
        self._in_collective.append(future)
        await future

    def member_ended(self) -> None:
        # Both are of the launch as it stands now: one that is to be started again is not done.
        started = len(self.members) == len(self.plan.boxes)
        self.done = started and all(box.outcome == "done" for box in self.members)
        self.over = self.done and all(box.outcome for box in self.boxes)
        self.world.fate.call_soon(self._ended.set)

    async def launch(self) -> None:
        """Run until all boxes have ended."""
        rng = self.world.rng
        await asyncio.sleep(self.plan.opens_at)
        while True:
            self.launches += 1
            self.done = False
            self.finished[self.launches] = set()
            resuming = bool(self.saved) and rng.random() < 0.7
            for plan in self.plan.boxes:
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.5)) * rng.random())
                self.boxes.append(Box(self, plan, self.launches, self.saved[plan.number] if resuming else None))
            while not self.done and all(box.outcome in ("", "done") for box in self.members):
                self._ended.clear()
                await self._ended.wait()
            if self.done:
                return
            if not (self.keyed and rng.random() < 0.2):  # else they are not found, and live on
                for box in self.members:
                    box.process.kill()
            await asyncio.sleep(rng.uniform(0.1, 2.0))

    def waits_for(self) -> list[str]:
        return [f"{box.process.name}: {box.outcome or box.doing}" for box in self.boxes if box.outcome != "done"]
