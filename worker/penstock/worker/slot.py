"""One slot on this worker: its runner, what is kept of it, and what can be answered about it.

A slot is one generation's: when the runner dies or the slot moves, this object ends and another begins. It never runs
user code; what needs user code (checking a snapshot, a state between snapshots) is done by scratch children.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import signal
import socket
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.proto.calls import AsyncCoordinatorClient
from penstock.proto.channel import detail_of, error_of
from penstock.proto.errors import (
    CoordinatorUnavailableError,
    DeadlineError,
    NotRestartableError,
    PenstockError,
    ReplayMismatchError,
    StateUnavailableError,
    WorkerLostError,
    error_named,
)
from penstock.proto.v1 import coordinator_pb2, lane_pb2, records_pb2
from penstock.worker.children import Child, Zygote
from penstock.worker.control import Message
from penstock.worker.ledger import Ledger
from penstock.worker.snapshots import Kept, SnapshotStore

__all__ = ["Host", "Share", "Slot", "key_of"]

_log = logging.getLogger("penstock.worker")

STOP_GRACE_S = 0.5
"""For a runner that is asked to end, before its process group is killed."""
SCRATCH_DEADLINE_S = 120.0
POLL_S = 0.005
"""How often the ledger is read while somebody waits for a batch to be produced."""
EARLY_SNAPSHOTS = 3
"""That are checked."""
CHECKED_BATCHES = 4
"""Batches after a restored snapshot that are compared with those delivered."""

SlotKey = tuple[str, int, int, int, int]


def key_of(assignment: records_pb2.WorkerAssignment) -> SlotKey:
    """(run, attempt, box, slot, generation)."""
    a = assignment
    return a.run, a.attempt, a.box, a.slot, a.generation


@dataclass
class Trust:
    """What a run's check on this worker found: do restored snapshots reproduce what was delivered?"""

    started: bool = False
    exact: bool | None = None


@dataclass(frozen=True)
class Share:
    """Of a slot in the fleet's durable snapshots, as the coordinator says: its budget is of calls and of bytes."""

    every_s: float
    bytes_per_s: float

    def pause_s(self, size: int) -> float:
        """After a snapshot of so many bytes."""
        return max(self.every_s, size / self.bytes_per_s)


class Host(Protocol):
    """What a slot needs of its daemon."""

    name: str
    coordinator: AsyncCoordinatorClient
    scratch_limit: asyncio.Semaphore
    share: Share

    async def zygote(self, assignment: records_pb2.WorkerAssignment) -> Zygote: ...
    def trust(self, assignment: records_pb2.WorkerAssignment) -> Trust: ...
    def trust_found(self, assignment: records_pb2.WorkerAssignment) -> None: ...
    def slot_changed(self) -> None: ...


class Slot:
    """A slot's life on this worker: from `start()` to `stop()`, everything else in between."""

    def __init__(self, host: Host, assignment: records_pb2.WorkerAssignment) -> None:
        self.assignment = assignment
        self.phase = coordinator_pb2.STARTING
        self.error: records_pb2.ErrorDetail | None = None
        self.lost = False
        self.traits = records_pb2.LoaderTraits(length=-1)
        self.ledger = Ledger.create()
        self.name = f"{assignment.run} box {assignment.box} slot {assignment.slot}"
        self._host = host
        self._store = SnapshotStore()
        self._early: list[Kept] = []
        """The first snapshots, whatever the store has let go since: for the check."""
        self._child: Child | None = None
        self._unsaved: records_pb2.ErrorDetail | None = None
        self._ready = asyncio.Event()
        self._stopping = False
        self._attached = False
        self._begun = False
        self._life: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate_from = (time.monotonic(), 0)
        self._rate = 0.0
        base = assignment.base.slots
        self._first_total = base[assignment.slot].total if len(base) > assignment.slot else 0

    # ---- its life

    def start(self) -> None:
        """Begin its life."""
        self._life = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Start the runner and see it to its end."""
        try:
            await self._start()
            assert self._child is not None
            self._spawn(self._upload())
            self._spawn(self._check_once())
            status = await asyncio.shield(self._child.exited)
            if not self._stopping and self.phase != coordinator_pb2.FAILED:
                self._lose(_how_it_ended(status, self.name, self.ledger))
        except asyncio.CancelledError:
            raise
        except PenstockError as error:
            self.fail(detail_of(error), lost=isinstance(error, WorkerLostError | CoordinatorUnavailableError))
        except Exception as error:
            _log.exception("%s: starting it failed", self.name)
            self.fail(detail_of(error), lost=True)

    async def _start(self) -> None:
        host, a = self._host, self.assignment
        blob = await host.coordinator.get_blob(a.resume.blob) if a.resume.blob else b""
        a.loader.arguments = await host.coordinator.loader_arguments(a.loader)
        kept: list[tuple[coordinator_pb2.SnapshotHeader, bytes]] = []
        if a.recovery:
            run, attempt, box, slot, generation = key_of(a)
            kept = await host.coordinator.get_snapshots(
                coordinator_pb2.GetSnapshotsRequest(run=run, attempt=attempt, box=box, slot=slot, generation=generation)
            )
        zygote = await host.zygote(a)
        child = self._child = await zygote.fork("runner", self.name, self.ledger, self._hear)
        await child.send("assign", a.SerializeToString())
        if blob and not a.recovery:
            await child.send("resume", blob)
        for header, data in kept:
            await child.send("base", data)
            self._store.add(
                Kept(
                    header.epoch,
                    header.delivered,
                    header.total,
                    header.samples,
                    header.origin,
                    header.step,
                    data,
                    durable=True,
                ),
                0,
            )
        if host.trust(a).exact:
            await child.send("trust")
        await child.send("go")

    async def stop(self) -> None:
        """End it: the runner, its process group, and whatever is under way here."""
        self._stopping = True
        under_way = [*self._tasks, *([self._life] if self._life is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(STOP_GRACE_S)
            await self._child.exited
        self.ledger.close()

    def fail(self, error: records_pb2.ErrorDetail, *, lost: bool) -> None:
        """It is over: for good, or (lost) for another worker to take over."""
        if self._stopping or self.phase == coordinator_pb2.FAILED:
            return
        self.phase, self.error, self.lost = coordinator_pb2.FAILED, error, lost
        _log.warning("%s: %s", self.name, error.message)
        if self._child is not None:
            self._child.kill()
        self._host.slot_changed()

    def _lose(self, why: str) -> None:
        self.fail(
            records_pb2.ErrorDetail(name="WorkerLostError", message=f"{why} on worker {self._host.name}"), lost=True
        )

    def report(self) -> coordinator_pb2.SlotReport:
        """For the heartbeat."""
        self.ledger.refresh()
        now, (since, before) = time.monotonic(), self._rate_from
        if now - since >= 1.0:
            self._rate = max(0, self.ledger.total - before) / (now - since)
            self._rate_from = (now, self.ledger.total)
        run, attempt, box, slot, generation = key_of(self.assignment)
        # Known once the first batch is out; until then nobody is to be warned.
        self.traits.looked_at_assignment = bool(self.ledger.looked) or not self._begun
        return coordinator_pb2.SlotReport(
            run=run,
            attempt=attempt,
            box=box,
            slot=slot,
            generation=generation,
            phase=self.phase,
            traits=self.traits,
            error=self.error,
            lost=self.lost,
            produced=self.ledger.total,
            delivered=self.ledger.delivered,
            batches_per_s=self._rate,
        )

    # ---- what the runner says

    def _hear(self, message: Message) -> None:
        if self._stopping:
            return
        fields = message.fields
        if message.kind == "base":
            place = (fields["epoch"], fields["delivered"], fields["total"], fields["samples"])
            base = Kept(*place, fields["origin"], fields["step"], message.payload)
            self._store.add(base, self._oldest_wanted())
            if not base.origin and len(self._early) < EARLY_SNAPSHOTS:
                self._early.append(base)
            return  # nothing that a report tells: a heartbeat for each would cost four times the snapshot
        if message.kind == "ready":
            self.traits.ParseFromString(message.payload)
            self._spawn(self._become_ready())
        elif message.kind == "unsaved":
            self._unsaved = records_pb2.ErrorDetail(**fields["error"])
            _log.warning("%s: its state cannot be saved: %s", self.name, self._unsaved.message)
        elif message.kind == "begun":
            self._begun = True
        elif message.kind == "left":
            self._store.forget_after(fields["epoch"], fields["total"])
        elif message.kind == "broken":
            _log.warning("%s: %s", self.name, fields["error"]["message"])
        elif message.kind == "failed":
            self.fail(records_pb2.ErrorDetail(**fields["error"]), lost=False)
        self._host.slot_changed()

    async def _become_ready(self) -> None:
        """The first snapshot is durable before any batch can be fetched: none is out that could not be recovered."""
        for base in list(self._store):
            if not base.durable:
                await self._make_durable(base)
        if self.phase == coordinator_pb2.STARTING:
            self.phase = coordinator_pb2.READY
            self._ready.set()
            self._host.slot_changed()

    # ---- lanes

    async def attach(self, sock: socket.socket, hello: lane_pb2.Hello, deadline_s: float) -> None:
        """Hand a consumer's connection to the runner."""
        try:
            await asyncio.wait_for(self._ready.wait(), deadline_s)
            assert self._child is not None
            self._attached = True
            await self._child.send("attach", hello.SerializeToString(), [sock.detach()])
        except TimeoutError:
            sock.close()

    # ---- durable snapshots

    async def _upload(self) -> None:
        await self._ready.wait()
        # The slots of a job start together: each begins at a moment of its own.
        await asyncio.sleep(random.random() * self._host.share.every_s)
        while True:
            newest = next((base for base in reversed(self._store) if self._usable(base)), None)
            size = 0
            if newest is not None and not newest.durable:
                size = len(newest.data)
                await self._make_durable(newest)
            await asyncio.sleep(self._host.share.pause_s(size))

    async def _make_durable(self, base: Kept) -> None:
        run, attempt, box, slot, generation = key_of(self.assignment)
        header = coordinator_pb2.SnapshotHeader(
            run=run,
            attempt=attempt,
            box=box,
            slot=slot,
            generation=generation,
            epoch=base.epoch,
            delivered=base.delivered,
            total=base.total,
            samples=base.samples,
            size=len(base.data),
            origin=base.origin,
            step=base.step,
        )
        while True:
            try:
                await self._host.coordinator.put_snapshot(header, base.data)
                break
            except CoordinatorUnavailableError:
                await asyncio.sleep(0.2)
            except PenstockError as error:
                _log.warning("%s: its snapshot was not made durable: %s", self.name, error.message)
                break
        base.durable = True

    def _usable(self, base: Kept) -> bool:
        """May a restart rely on it? Snapshots of loaders with worker processes only once they were shown exact."""
        return base.origin or not self._origins_only()

    def _origins_only(self) -> bool:
        return self.traits.own_workers > 0 and not self._host.trust(self.assignment).exact

    def _oldest_wanted(self) -> int:
        """The smallest total that a state may be asked for: the slot's share of the retention window back."""
        self.ledger.refresh()
        steps = self.assignment.loader.options.retention_steps
        return max(0, self.ledger.delivered - math.ceil(steps / self.assignment.num_workers_per_box) - 1)

    # ---- states

    async def state(self, request: coordinator_pb2.StateRequest) -> tuple[coordinator_pb2.StateAnswer, bytes]:
        """The slot's state at a place, once the place is produced; or where the pass ended before it."""
        answer = coordinator_pb2.StateAnswer(request=request.request, worker=self._host.name)
        data = b""
        try:
            async with asyncio.timeout(request.deadline_s):
                data = await self._state(request, answer)
        except TimeoutError:
            self.ledger.refresh()
            doing, since = self.ledger.activity
            error: PenstockError = DeadlineError(
                f"{self.name} on worker {self._host.name}: no state at step {request.step} within "
                f"{request.deadline_s:.0f} s: it is at batch {self.ledger.total} of {request.position.total}, "
                f"in {doing} for {since:.1f} s"
            )
            answer.error.CopyFrom(detail_of(error))
        except PenstockError as error:
            answer.error.CopyFrom(detail_of(error))
        for epoch, total in self.ledger.ends().items():
            answer.ends.add(epoch=epoch, total=total)
        answer.traits.CopyFrom(self.traits)
        answer.state_bytes = len(data)
        return answer, data

    async def _state(self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer) -> bytes:
        epoch, delivered, total = request.epoch, request.position.delivered, request.position.total
        await self._ready.wait()
        if request.aggregate_blob:
            states = await self._host.coordinator.get_blob(request.aggregate_blob)
            return (await self._scratch([states], "aggregate")).payload
        self._require_saving()
        if not await self._produced(request, answer):
            return b""
        entry = self.ledger.entry(total)
        if entry is not None:
            answer.samples_streamed, answer.digest = entry.samples, entry.digest
        if self._unsaved is not None and not self.traits.state_methods == 0:
            raise error_of(self._unsaved)
        base = self._store.exactly(epoch, delivered, total, request.step)
        if self.traits.state_methods == 0:
            base = self._store.nearest(epoch, total, origins_only=True)
        if base is not None and self._usable(base):
            if entry is None and base.total == total:
                answer.samples_streamed = base.samples
            return base.data
        return await self._materialise(request, answer)

    def _require_saving(self) -> None:
        where = f"{self.assignment.loader.input_fn} ({self.name})"
        if self.traits.not_restartable:
            raise NotRestartableError(f"{where} cannot be saved: {self.traits.not_restartable}")
        if self.traits.state_methods == 0 and not self.assignment.loader.options.replay_without_state:
            raise NotRestartableError(
                f"{where} has no state_dict and load_state_dict, so its state cannot be saved; give it the methods of "
                "RestartableDataLoader, or ask for saving by replay: Appliance(replay=True)"
            )

    async def _produced(self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer) -> bool:
        """Wait until the place is reached; False, with the answer filled in, if its pass, or the one before, ended
        elsewhere than the asker thought."""
        epoch, total = request.epoch, request.position.total
        began = total - request.position.delivered
        while True:
            self.ledger.refresh()
            ends = self.ledger.ends()
            if ends.get(epoch - 1, began) != began:
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch - 1, ends[epoch - 1]
                return False
            if ends.get(epoch, total) < total:
                answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, ends[epoch]
                return False
            if self.assignment.recovery and not self._attached:
                # The runner waits for the training loop to say where it goes on, and the loop may be waiting for this
                # state. What was delivered was produced once, so it can be had by replay.
                return True
            if self.ledger.total >= total:
                assert self._child is not None
                self._child.drain()  # its snapshots were sent before the ledger showed the batch
                return True
            if self.phase == coordinator_pb2.FAILED:
                raise StateUnavailableError(f"{self.name}: it failed before batch {total}")
            await asyncio.sleep(POLL_S)

    async def _materialise(self, request: coordinator_pb2.StateRequest, answer: coordinator_pb2.StateAnswer) -> bytes:
        epoch, total = request.epoch, request.position.total
        if self._host.trust(self.assignment).exact is None and self.traits.own_workers == 0:
            origins_only = False
        else:
            origins_only = self._origins_only()
        base = self._store.nearest(epoch, total, origins_only=origins_only)
        if base is None:
            raise StateUnavailableError(
                f"{self.name}: nothing is kept any more from which batch {total} could be reached"
            )
        digests = {
            str(count): entry.digest
            for count in range(base.total + 1, total + 1)
            if (entry := self.ledger.entry(count)) is not None
        }
        done = await self._scratch(
            [base.data],
            "state",
            epoch=epoch,
            total=total,
            step=request.step,
            from_origin=origins_only,
            digests=digests,
        )
        if done.fields["ended"]:
            answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, done.fields["total"]
            return b""
        answer.samples_streamed, answer.digest = done.fields["samples"], done.fields["digest"]
        return done.payload

    # ---- scratch children

    async def _scratch(self, bases: list[bytes], task: str, **fields: Any) -> Message:
        """Have a scratch child do something with the loader; its answer."""
        host, a = self._host, self.assignment
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def hear(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        async with host.scratch_limit:
            zygote = await host.zygote(a)
            child = await zygote.fork("scratch", f"{self.name} {task}", self.ledger, hear)
            try:
                await child.send("assign", a.SerializeToString())
                for base in bases:
                    await child.send("base", base)
                await child.send(task, **fields)
                either: set[asyncio.Future[Any]] = {answer, child.exited}
                await asyncio.wait(either, timeout=SCRATCH_DEADLINE_S, return_when="FIRST_COMPLETED")
                if not answer.done():
                    if child.exited.done():
                        how = _how_it_ended(child.exited.result(), f"the scratch child of {self.name}", None)
                        raise WorkerLostError(f"{how}; the stream goes on")
                    raise DeadlineError(
                        f"the scratch child of {self.name} did not finish its {task} in {SCRATCH_DEADLINE_S:.0f} s; "
                        "the stream goes on"
                    )
                message = answer.result()
            finally:
                child.kill()
        if message.kind == "failed":
            raise error_named(**message.fields["error"])
        return message

    async def _check_once(self) -> None:
        """Once per run on this worker: do restored snapshots reproduce what was delivered?"""
        await self._ready.wait()
        trust = self._host.trust(self.assignment)
        if trust.started or self.traits.state_methods == 0 or self.traits.not_restartable:
            return
        trust.started = True
        bases, digests = await self._early_snapshots()
        self._early = []
        if not bases:
            return
        try:
            done = await self._scratch([base.data for base in bases], "check", digests=digests)
        except PenstockError as error:
            _log.warning("%s: its snapshots could not be checked: %s", self.name, error)
            return
        trust.exact = bool(done.fields["same"])
        self._host.trust_found(self.assignment)
        if trust.exact:
            return
        at, differs = done.fields["base_total"], done.fields["differs"]
        if self.traits.own_workers:
            _log.info(
                "%s: a restored snapshot does not reproduce its batches (randomness in the loader's own worker "
                "processes, probably): states are saved by replay from the start of the pass",
                self.name,
            )
            return
        mismatch = ReplayMismatchError(
            f"{self.assignment.loader.input_fn}: restored from its state_dict() after batch {at} of {self.name}, the "
            f"loader {done.fields['what']}: batch {differs} (step {self._step_of(differs)}) is not the one that was "
            "delivered. Does it count after its `yield`, or prefetch in the background? Its state must be that of the "
            "batches it has handed out"
        )
        self.fail(detail_of(mismatch), lost=False)

    async def _early_snapshots(self) -> tuple[list[Kept], dict[str, int]]:
        """The first snapshots of a pass, and by count the digests of the batches that followed each.

        Three, for a loader with a thread of its own may not have run ahead at the first; fewer if the pass is short.
        """
        while True:
            self.ledger.refresh()
            taken = self._early
            enough = len(taken) == EARLY_SNAPSHOTS and self.ledger.total >= taken[-1].total + CHECKED_BATCHES
            if enough or (taken and taken[0].epoch in self.ledger.ends()):
                followers = [(base, self._followers(base)) for base in taken if base.epoch == taken[0].epoch]
                bases = [base for base, digests in followers if digests]
                return bases, {count: digest for _, digests in followers for count, digest in digests.items()}
            await asyncio.sleep(10 * POLL_S)

    def _followers(self, base: Kept) -> dict[str, int]:
        """Count -> digest of the batches right after a base, as far as they are known."""
        counts = range(base.total + 1, base.total + 1 + CHECKED_BATCHES)
        entries = [entry for count in counts if (entry := self.ledger.entry(count)) is not None]
        return {str(entry.total): entry.digest for entry in entries if entry.epoch == base.epoch}

    def _step_of(self, total: int) -> int:
        """The box's step that delivered this batch, as long as all slots live."""
        base = self.assignment.base
        turns = list(base.live)
        ahead = (turns.index(self.assignment.slot) - base.cursor) % len(turns) if self.assignment.slot in turns else 0
        return base.step + ahead + 1 + (total - self._first_total - 1) * len(turns)

    async def trusted(self) -> None:
        """The check has shown that snapshots are exact."""
        if self._child is not None:
            await self._child.send("trust")

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_logged(work, self.name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: Awaitable[None], name: str) -> None:
    try:
        await work
    except Exception:
        _log.exception("%s: a background task failed", name)


def _how_it_ended(status: int, name: str, ledger: Ledger | None) -> str:
    """What a child's exit status means, and what it was doing."""
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            how += " (out of memory, if nobody sent it)"
    else:
        how = f"exited with status {status}"
    if ledger is None:
        return f"{name} {how}"
    ledger.refresh()
    return f"the runner of {name} {how} at batch {ledger.total}, in {ledger.activity[0]}"
