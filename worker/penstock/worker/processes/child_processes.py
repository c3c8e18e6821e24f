"""Children of the daemon, which a fork server forks: runners and helper processes. All code here runs on the event
loop.

A pidfd shows a child's end, also if its fork server is stopped; its sockets do not, because processes that it forked
may keep them open. The fork server reports the exit status. Without that it is read from /proc, as long as the child is
not reaped; otherwise it is unknown. All messages of a child are handled before its end is reported.

User code can send any number of messages. The event loop handles those of a child for a few milliseconds in a turn, and
lets the child wait while its socket is full: it is slowed, and killed for invalid messages only. The payload of a large
one is read by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import WeakSet

from penstock.proto.errors import InputFnError, LaneLostError, PenstockError
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.end import describe_exit, kill_group, zombie_status
from penstock.runtime.process.watch import Process
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.processes.child_output import PAUSE_S, READ_BYTES, OutputLines
from penstock.worker.processes.control_channel import (
    DESCRIPTORS_CLOSED,
    MAX_PACKET,
    MAX_PAYLOAD,
    ControlChannel,
    ControlMessage,
    LargeMessage,
    close_all,
    decoded,
    invalid_message,
    packed,
)
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.stack_dump import StackFile

_log = logging.getLogger("penstock.worker")
_user_log = logging.getLogger("penstock.user")
LOOK_S = 0.02
"""Seconds between two looks whether a child has read what it was sent."""
STATUS_S = 0.25
"""Seconds to wait for the fork server's report of an exit status, before the daemon looks itself."""
TURN_S = 0.004
"""Processor time for the messages of one child until the event loop turns to all others. Most take 0.02 ms, a snapshot
beside a thousand others 0.25 ms, and the worst JSON of MAX_JSON bytes 10 to 50 ms."""
PAUSES = 4
"""Pause after TURN_S, in times of its duration, for each child that pauses."""
LAST_MESSAGES_S = 5.0
"""Seconds for the messages of a child that has ended: it may have left hundreds of large ones."""
LAST_STATUS_S = 2.5
"""Seconds after a death at which the status counts as unknown: reaped by the fork server and not reported."""


def about_slot(assignment: records_pb2.WorkerAssignment) -> dict[str, Any]:
    """Return the fields that name a slot's generation in log records and messages."""
    a = assignment
    return {"run": a.run, "attempt": a.attempt, "box": a.box, "slot": a.slot, "generation": a.generation}


async def _packed(message: ControlMessage) -> tuple[list[bytes], list[int]]:
    """As `packed`, in a thread if the message is large."""
    if len(message.payload) <= MAX_PACKET:
        return packed(message)
    packing = asyncio.ensure_future(asyncio.to_thread(packed, message))
    try:
        return await asyncio.shield(packing)
    except asyncio.CancelledError:
        packing.add_done_callback(lambda done: close_all(done.result()[1]))
        raise


class Child:
    _pausing: ClassVar[WeakSet[Child]] = WeakSet()

    def __init__(
        self,
        channel: ControlChannel,
        output: int,
        name: str,
        on_message: Callable[[ControlMessage], None],
        on_gone: Callable[[], None],
        about: Mapping[str, str | int] | None = None,
    ) -> None:
        self.name = name
        self._logger = SubjectLogger(_log, **(about or {}))
        self._user_logger = SubjectLogger(_user_log, **(about or {}))
        self.pid = 0
        self._process: Process | None = None
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int | None] = loop.create_future()
        """Negative for a signal, as in subprocess; None if unknown."""
        self.stacks = StackFile()
        self.last_stack = ""
        self._channel = channel
        self._on_message = on_message
        self._on_gone = on_gone
        self._sending = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        """Reads a large message; the next is not received before it is handled."""
        self._finishing: asyncio.Task[None] | None = None
        self._took_s = 0.0
        """Processor time for its messages since the last pause."""
        self._open = True
        self.unwanted = False
        """True once `kill` was called: death by SIGKILL is then no reason to try again."""
        self.why_killed = ""
        """End of a sentence, if it was killed for an invalid message."""
        self.sends_descriptors = ""
        """Kind of the only message that may carry descriptors; "" = none."""
        self.most_bytes = MAX_PAYLOAD
        """Largest payload that the child may send."""
        self._output = output
        self._lines = OutputLines(time.monotonic())
        os.set_blocking(output, False)
        self._listen()
        loop.add_reader(output, self._read_output)

    async def send(self, kind: str, payload: bytes = b"", fds: list[int] | None = None, **fields: object) -> None:
        """Send a message, and close `fds`. If the child is dead, drop the message."""
        memory: list[int] = []
        try:
            async with self._sending:
                parts, memory = await _packed(ControlMessage(kind, fields, payload))
                with contextlib.suppress(OSError, LaneLostError):
                    while self._open and not self._channel.send_packet(parts, fds or [], memory, wait=False):
                        await asyncio.sleep(LOOK_S)  # no thread waits: user code decides for how long
        finally:
            close_all(memory)
            close_all(fds or [])

    @property
    def reads_late(self) -> bool:
        return self._open and self._channel.unread > 0

    def hear(self) -> None:
        """Handle messages that have arrived, for one turn."""
        with self._killed_if_invalid(), self._timed():
            began = time.thread_time()
            while self._open and self._reading is None and time.thread_time() - began < TURN_S:
                message = self._channel.receive_packet(wait=False)
                if message is None:
                    break
                if isinstance(message, LargeMessage):
                    self._stop_listening()
                    self._reading = asyncio.ensure_future(self._read(message))
                else:
                    self._handle(message)

    async def _read(self, message: LargeMessage) -> None:
        with self._killed_if_invalid():
            data, payload = await asyncio.to_thread(message.read, self.most_bytes)
            with self._timed():
                self._handle(decoded(data, message.fds, payload))
        self._reading = None
        self._listen()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Pause after each TURN_S of messages, so that children which never stop take a fifth of the event loop's time
        together."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._took_s += time.thread_time() - began
            if self._took_s >= TURN_S:
                self._stop_listening()
                self._pausing.add(self)
                asyncio.get_running_loop().call_later(PAUSES * self._took_s * len(self._pausing), self._resume)
                self._took_s = 0.0

    def _resume(self) -> None:
        self._pausing.discard(self)
        self._listen()

    def _listen(self) -> None:
        if self._open and self._reading is None and self not in self._pausing:
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self.hear)

    def _stop_listening(self) -> None:
        if self._open:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def _handle(self, message: ControlMessage) -> None:
        if message.fds and (message.kind != self.sends_descriptors or not self._open):  # they cost the daemon its own
            close_all(message.fds)
            raise invalid_message(f"a runner must send no file descriptors with its message {message.kind[:40]!r}")
        self._on_message(message)

    async def drain(self) -> None:
        """Handle all messages that have arrived by now."""
        until = self._channel.received + (self._channel.arrived if self._open else 0)
        while self._open:
            if self._reading is not None:
                await asyncio.wait([self._reading])
            elif self in self._pausing:
                await asyncio.sleep(TURN_S)
            elif self._channel.received < until:
                self.hear()
                await asyncio.sleep(0)
            else:
                break

    @contextlib.contextmanager
    def _killed_if_invalid(self) -> Iterator[None]:
        """Kill the child for an invalid message: user code may have written to the socket."""
        try:
            yield
        except LaneLostError:
            self._shut()
        except Exception as error:
            traceback = None if isinstance(error, PenstockError) else error
            self._logger.warning(
                "%s: the worker killed this process, because it sent an invalid message: %s",
                self.name,
                error,
                exc_info=traceback,
            )
            self.why_killed = f"was killed, because it sent an invalid message: {error}"
            self._shut()
            self.kill()

    def kill(self) -> None:
        self.unwanted = True
        self.kill_process()

    def kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.send("stop")  # waits if the child has not read an earlier large message
                await asyncio.shield(self.exited)
        self.kill()

    async def stack(self, pid: int = 0) -> str:
        """Return the stacks of the child or its descendant `pid`, or one line that says why there is none; "" if it has
        ended or is not forked yet."""
        if self._process is None:
            return ""
        if pid in (0, self.pid):
            return await self.stacks.ask(self._process)
        try:
            process = Process(pid)
        except OSError:
            return ""
        with process:
            return await self.stacks.ask(process)

    # ---- end of a child

    def begun(self, pid: int, pidfd: int) -> None:
        self.pid, self._process = pid, Process(pid, pidfd)
        self._process.on_end(self._ended)
        if self.unwanted:
            self.kill()
        if not self.forked.done():
            self.forked.set_result(None)

    def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(STATUS_S, self._find_status, loop.time() + LAST_STATUS_S)

    def _find_status(self, until: float) -> None:
        """Find a dead child's unreported status. If the kernel still has it, the fork server is stopped; otherwise it
        is busy: try again, until monotonic time `until`."""
        if self._finishing is not None:
            return
        loop = asyncio.get_running_loop()
        unreaped, status = zombie_status(self.pid)
        if unreaped:
            kill_group(self.pid)
            self.gone(status)
        elif loop.time() < until:
            loop.call_later(STATUS_S, self._find_status, until)
        else:
            self.gone(None)

    def gone(self, status: int | None) -> None:
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._finish(status))

    async def _finish(self, status: int | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGES_S):
                await self.drain()
        loop = asyncio.get_running_loop()
        self._read_output()
        self._shut()
        if self._output >= 0:
            loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
            self._log(self._lines.feed(b"", time.monotonic()))
        if self._process is not None:
            self._process.close()
            self._process = None
        if not self.forked.done():
            self.forked.set_result(None)
        self.last_stack = self.stacks.read()
        self.stacks.close()
        self.exited.set_result(status)
        self._on_gone()

    def _shut(self) -> None:
        if self._open:
            self._stop_listening()
            self._open = False
            self._channel.close()

    # ---- output of a child

    def _read_output(self) -> None:
        if self._output < 0:
            return
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        loop = asyncio.get_running_loop()
        self._log(self._lines.feed(data, time.monotonic()))
        if not data:
            loop.remove_reader(self._output)
        elif self._lines.too_fast:
            loop.remove_reader(self._output)
            loop.call_later(PAUSE_S, self._read_again)

    def _read_again(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().add_reader(self._output, self._read_output)

    def _log(self, lines: list[str]) -> None:
        for line in lines:
            self._user_logger.info("[%s] %s", self.name, line)


def how_it_ended(status: int | None, progress_page: ProgressPage) -> str:
    """Return the end of a sentence, such as "was killed by SIGKILL after batch 17, in next"."""
    progress_page.refresh()
    return f"{describe_exit(status)} after batch {progress_page.total}, in {progress_page.activity[0]}"


def descriptors_closed(status: int | None, name: str) -> InputFnError | None:
    """Return the error if user code closed the control socket; no WorkerLostError: a replacement would end likewise."""
    if status != DESCRIPTORS_CLOSED:
        return None
    return InputFnError(f"{name}: user code closed file descriptors of Penstock, as os.closerange() does")
