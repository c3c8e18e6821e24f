"""Connections (lanes) of training jobs to a slot's runner.

The daemon sends finished batches to a new consumer itself: the runner may be in the user's next() for minutes before it
takes the connection. It writes each frame into a log in shared memory, and tells the daemon of rings and structures.
The daemon decides nothing: acks wait in the socket, and the runner sends what is missing: everything, if the consumer
has abandoned an epoch since, or the log does not reach back far enough.

The daemon announces the consumer before it reads the log; a runner that finds the announcement does not return into
user code until it has the connection, so batches finished in between are not delayed. Only one connection waits for the
runner; a newer one refuses it. Otherwise a consumer that opens lanes again and again would fill the control socket and
the daemon's descriptors. At the slot's end the waiting one is refused, as no runner will take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.proto.errors import LaneLostError, ProtocolError, SupersededError
from penstock.proto.lane.frame_log import FrameLog
from penstock.proto.lane.frames import (
    BATCH,
    HEAD,
    MAX_STRUCTURE,
    RING,
    Frame,
    forget_oldest,
    framed,
    read_frame,
    structure_frames,
)
from penstock.proto.lane.outbox import Outbox
from penstock.proto.v1 import lane_pb2
from penstock.worker.processes.child_processes import LOOK_S, Child
from penstock.worker.processes.control_channel import ControlMessage, close_all, counts, invalid_message, is_memory
from penstock.worker.slots.slot_record import COORDINATOR_ERRORS, SlotRecord

_MOST_BYTES = 96 << 10
"""Bytes sent to a new consumer without waiting: its buffer has 208 KiB by default. The runner sends the rest."""


class FinishedBatches:
    """What a slot's runner has sent, as far as the daemon knows."""

    def __init__(self, log: FrameLog) -> None:
        self._log = log
        self._rings: dict[int, tuple[bytes, int]] = {}
        self._structures: dict[int, bytes] = {}
        self._announced = self._passed_on = 0

    def close(self) -> None:
        close_all([fd for _, fd in self._rings.values()])
        self._rings.clear()

    def learn_rings(self, message: ControlMessage) -> None:
        """Replace all earlier rings by the runner's present ones."""
        self.close()
        numbers = message.fields.get("rings")
        fds = list(message.fds)
        is_fit = type(numbers) is list and len(numbers) == len(fds) and all(map(_is_ring, numbers))
        if type(numbers) is not list or not is_fit or not all(map(is_memory, fds)):
            close_all(fds)
            raise invalid_message(
                f"the rings of a runner must be memory, and given by three numbers each, got {numbers!r:.200}"
            )
        for (ring, entry_bytes, entries), fd in zip(numbers, fds, strict=True):
            frame = Frame(RING, ring=ring, entry=entries, nbytes=entry_bytes)
            self._rings[ring] = framed(frame.encode()), fd

    def learn_structure(self, message: ControlMessage) -> None:
        (number,) = counts(message, "number")
        if len(message.payload) > MAX_STRUCTURE:
            raise invalid_message(f"a structure must have at most {MAX_STRUCTURE} bytes, got {len(message.payload)}")
        self._structures[number] = message.payload
        forget_oldest(self._structures)

    def announce(self) -> int:
        """Announce a consumer, and return its number. Read what the runner has told after this, then call `send`."""
        self._announced += 1
        self._log.announce(self._announced)
        return self._announced

    def pass_on(self, consumer: int) -> None:
        """Let the runner no longer wait for consumers up to this one, passed on or gone."""
        if consumer > self._passed_on:
            self._passed_on = consumer
            self._log.pass_on(consumer)

    def send(self, sock: socket.socket, hello: lane_pb2.Hello) -> dict[str, Any]:
        """Send the finished batches that the consumer lacks, without waiting. Return fields for the runner. Raises
        LaneLostError."""
        served = 0
        outbox = Outbox()
        for message, fd in self._rings.values():
            outbox.add(message)
            outbox.add(fd)
        announced: set[int] = set()
        size = 0
        for number, message, frame in self._undelivered(hello):
            parts = [message]
            if frame.kind == BATCH and frame.structure not in announced:
                data = self._structures.get(frame.structure)
                if data is None:
                    break
                parts = [*structure_frames(frame.structure, data), message]
                announced.add(frame.structure)
            size += sum(map(len, parts))
            if size > _MOST_BYTES or (frame.kind == BATCH and frame.ring not in self._rings):
                break
            for part in parts:
                outbox.add(part)
            served = number + 1
        if not served:
            return {"served": 0, "rings": []}
        self._flush(outbox, sock)
        return {"served": served, "rings": list(self._rings)}

    def _flush(self, outbox: Outbox, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            outbox.flush(sock)
        except OSError as error:
            raise LaneLostError(f"the connection was lost before the finished batches were sent: {error}") from error
        if outbox:
            raise LaneLostError("the connection's buffer is too small for the finished batches")

    def _undelivered(self, hello: lane_pb2.Hello) -> list[tuple[int, bytes, Frame]]:
        """Return the frames that the consumer needs, with an END right after the last delivered batch; [] if
        uncertain."""
        delivered = max(1, hello.next_total) - 1
        needed: list[tuple[int, bytes, Frame]] = []
        oldest = -1
        for oldest, message in self._log.newest_first():
            try:
                frame = read_frame(memoryview(message), HEAD.size, len(message))
            except ProtocolError:
                return []
            if frame.abandons > hello.abandons:
                return []
            is_over = frame.total <= delivered if frame.kind == BATCH else frame.total < delivered
            if is_over or frame.abandons < hello.abandons:
                oldest = 0
                break
            needed.append((oldest, message, frame))
        needed.reverse()
        totals = [frame.total for _, _, frame in needed if frame.kind == BATCH]
        whole = oldest == 0 and totals == list(range(delivered + 1, delivered + 1 + len(totals)))
        return needed if whole else []


def _is_ring(numbers: Any) -> bool:
    return (
        type(numbers) is list
        and len(numbers) == 3
        and all(type(number) is int and 0 < number < 1 << 32 for number in numbers[::2])
        and type(numbers[1]) is int
        and 0 < numbers[1] < 1 << 62
    )


class SlotLanes:
    """Connections to one slot's runner. fetch: gets what a migration's target needs before its first connection. spawn:
    runs a task until the slot ends."""

    def __init__(
        self,
        slot: SlotRecord,
        fetch: Callable[[Child], Awaitable[object]],
        spawn: Callable[[Awaitable[None]], asyncio.Task[None]],
    ) -> None:
        self._slot, self._fetch, self._spawn = slot, fetch, spawn
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False
        self.finished = FinishedBatches(slot.progress_page.frame_log)
        self._passing: tuple[asyncio.Task[None], socket.socket, int] | None = None
        """Task that passes the newest connection on, with it and the consumer's number."""
        self._unread = False

    async def attach(self, sock: socket.socket, hello: lane_pb2.Hello, deadline_s: float) -> None:
        """Send the finished batches, and pass the connection on in the background; close it if the runner is not ready
        in `deadline_s`. Raises SupersededError (a newer connection, or the slot has ended), LaneLostError (the job is
        gone)."""
        try:
            await self._wait(deadline_s)
        except TimeoutError:
            sock.close()
            return
        child = self._slot.child
        assert child is not None
        self._drop_passing()
        consumer = self.finished.announce()
        try:
            child.hear()  # of new rings and structures
            served = self.finished.send(sock, hello)
        except BaseException:
            self.finished.pass_on(consumer)
            raise
        self._slot.attached = True
        self._passing = self._spawn(self._pass_on(child, sock, hello, served, consumer)), sock, consumer

    async def _wait(self, deadline_s: float) -> None:
        self._refuse_waiting()
        if self._ended:
            raise self._refusal()
        waiting = self._waiting = asyncio.ensure_future(self._until_ready(deadline_s))
        try:
            await waiting
        except asyncio.CancelledError:
            if self._waiting is waiting:  # not refused, but cancelled by the caller
                raise
            raise self._refusal() from None

    def _refuse_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    def _refusal(self) -> SupersededError:
        why = "the slot's runner has ended" if self._ended else "a newer connection reads its batches"
        return SupersededError(f"the connection to {self._slot.name} is closed, because {why}")

    async def _until_ready(self, deadline_s: float) -> None:
        slot = self._slot
        async with asyncio.timeout(deadline_s):  # not wait_for, which may lose a cancellation
            await slot.ready.wait()
        assert slot.child is not None
        if slot.assignment.is_target and not slot.attached:  # the slot's previous runner continued until now
            with contextlib.suppress(*COORDINATOR_ERRORS):  # on an error, start from the snapshots fetched before
                async with asyncio.timeout(deadline_s):
                    await self._fetch(slot.child)

    async def _pass_on(
        self, child: Child, sock: socket.socket, hello: lane_pb2.Hello, served: dict[str, Any], consumer: int
    ) -> None:
        while self._unread and child.reads_late:  # user code may keep the runner busy for any time
            await asyncio.sleep(LOOK_S)
        self._unread, self._passing = True, None
        try:
            await child.send("attach", hello.SerializeToString(), [sock.detach()], **served)
        finally:
            self.finished.pass_on(consumer)

    def _drop_passing(self) -> None:
        if self._passing is not None:
            task, sock, consumer = self._passing
            self._passing = None
            task.cancel()
            sock.close()
            self.finished.pass_on(consumer)

    def end(self) -> None:
        """Refuse connections that the runner has not got, and later ones."""
        self._ended = True
        self._refuse_waiting()
        self._drop_passing()
