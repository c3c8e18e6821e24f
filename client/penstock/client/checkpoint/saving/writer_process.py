"""The training process's side of its writer: starts it, hands it saves, learns how they ended, and ends it.

A thread reads the writer's replies, so that a save that failed is known, and told to the other ranks, while the loop
trains. Nothing is waited for without a deadline: a writer that dies is seen by its socket's end or by its pidfd, one
that hangs is killed when its save's time is up, and the next save starts another one.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import xxhash

from penstock.client.checkpoint.saving.shared_image import SharedImage
from penstock.client.checkpoint.saving.tensor_staging import StagingBuffer
from penstock.client.stream import open_streams
from penstock.proto.errors import CheckpointError, DeadlineError
from penstock.proto.state.checkpoint_files import FAILED, report_name, temporary_name
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.process.by_path import by_path
from penstock.runtime.telemetry.logs import about

__all__ = ["PendingSave", "WriterProcess", "wait_all"]

_log = logging.getLogger("penstock.checkpoint")

WRITER = Path(__file__).with_name("writer.py")
LENGTH = 8
START_S = 30.0
"""Seconds for the process to answer; it takes 0.1 on an idle machine."""
GRACE_S = 10.0
"""Seconds beyond a save's deadline: the writer gives up by itself, and says so, unless it hangs."""
LEAVE_S = 5.0
"""Seconds for a writer without work to leave."""


class PendingSave:
    """A save that was handed to the writer."""

    def __init__(self, request: dict[str, Any], buffer: StagingBuffer) -> None:
        self.request = request
        self.buffer = buffer
        """Whose image it is written from; in use until it has ended."""
        self.step: int = request["step"]
        self.written = 0
        """Bytes that this rank has written."""
        self.error: CheckpointError | None = None
        self.ended = threading.Event()
        self.began = time.monotonic()
        self.deadline = self.began + request["timeout_s"] + GRACE_S
        open_streams.saves.begun()

    @property
    def total(self) -> int:
        """Bytes that this rank writes."""
        return sum(size for _, _, size, _ in self.request["files"])

    def end(self, causes: dict[int, str]) -> None:
        """causes: rank -> why; empty if the checkpoint is there."""
        if self.ended.is_set():
            return
        if causes:
            what = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))
            self.error = CheckpointError(
                f"step {self.step} was not saved into {self.request['folder']}: {what}. What was saved before "
                "is as it was"
            )
            _log.warning("%s", self.error.message, extra=about(step=self.step))
        seconds = time.monotonic() - self.began
        open_streams.saves.ended(self.step, seconds, self.written, ok=not causes)
        self.ended.set()


class WriterProcess:
    """One rank's writer. `submit` starts one if none runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.RLock()  # a signal handler may come in between
        self._running: _Running | None = None

    @property
    def pid(self) -> int | None:
        """Of the running writer."""
        running = self._running
        return running.process.pid if running is not None and running.alive else None

    def start(self) -> None:
        """Have a writer running, and ready. Raises CheckpointError if none can be started."""
        with self._lock:
            self._start()

    def submit(self, pending: PendingSave, image: SharedImage | None, images: Iterable[SharedImage]) -> None:
        """Hand over a save.

        image: what its files lie in; None for a save that failed here and is only told to the other ranks.
        images: all that are in use, this one too.
        """
        with self._lock:
            try:
                self._start().submit(pending, image, {one.number for one in images})
            except CheckpointError as error:
                _give_up(pending, self.rank, error.message)
            except BaseException as error:
                # Interrupted: nobody knows how much of the request the writer has got, if there is one.
                why = f"interrupted by {type(error).__name__} before its writer had it"
                self.kill(why)
                _give_up(pending, self.rank, why)
                raise

    def wait(self, pending: PendingSave, timeout_s: float | None = None) -> bool:
        """Until a save has ended; kills a writer that lets the save's deadline pass. False if `timeout_s` was over."""
        if _ended(pending, _left(pending.deadline, timeout_s)):
            return True
        if time.monotonic() < pending.deadline:
            return False
        self.kill(f"its writer did not answer within {pending.request['timeout_s'] + GRACE_S:g} s, and was killed")
        return _ended(pending, LEAVE_S)

    def kill(self, why: str) -> None:
        """End the writer at once, and with it what it has not saved yet; the next save starts another."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.kill(why)

    def stop(self, *, finish: bool = False) -> None:
        """End a writer that has nothing to do any more. It is killed if it does not leave; or, to `finish`, leaves when
        it has done what it has to do."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.leave()
            if not finish:
                running.stop()

    def _start(self) -> _Running:
        if self._running is None or not self._running.alive:
            self._running = _Running(self.rank)
        return self._running


class _Running:
    """One process, from its start to its end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._queue: list[PendingSave] = []
        """Handed over and not ended, in the order in which they are written."""
        self._ended = False
        self._closing = ExitStack()
        self._why = ""
        """Why it was killed, if it was us."""
        self._mapped: set[int] = set()
        """Numbers of the images that it has."""
        try:
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise CheckpointError(f"rank {rank}: no writer process could be started: {error}") from error
        try:
            self.process = subprocess.Popen(
                [
                    *by_path(WRITER, xxhash),
                    *("--socket-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # whoever ends the training job's processes lets a save be finished
            )
        except BaseException as error:
            self._sock.close()
            if not isinstance(error, OSError):  # interrupted
                raise
            raise CheckpointError(f"rank {rank}: no writer process could be started: {error}") from error
        finally:
            theirs.close()
        ready = threading.Event()
        threading.Thread(target=self._listen, args=(ready,), name="penstock-checkpoint", daemon=True).start()
        try:
            started = ready.wait(START_S) and self.alive
        except BaseException:  # interrupted: nobody will have it
            self.process.kill()
            raise
        if not started:
            self.process.kill()
            raise CheckpointError(
                f"rank {rank}: the writer process did not start{_how(self.process)}; see its standard error"
            )

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.poll() is None

    def submit(self, pending: PendingSave, image: SharedImage | None, live: set[int]) -> None:
        numbers = {"image": None if image is None else image.number, "images": sorted(live)}
        data = json.dumps({**pending.request, **numbers}).encode()
        fresh = [image.fd] if image is not None and image.number not in self._mapped else []
        self._mapped = (self._mapped & live) | ({image.number} if image is not None else set())
        with self._lock:
            if self._ended:
                lost = True
            else:
                self._queue.append(pending)
                lost = False
        if lost:
            _give_up(pending, self._rank, self._how_it_ended())
            return
        try:
            socket.send_fds(self._sock, [len(data).to_bytes(LENGTH)], fresh)
            self._sock.sendall(data)
        except OSError:
            pass  # it has gone; the thread that reads its replies sees that too, and ends what is queued

    def kill(self, why: str) -> None:
        with self._lock:
            self._why = why
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it goes when it gets out
            self.process.wait(LEAVE_S)
        self._fail_all()

    def leave(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill("its writer did not leave")

    # ---- the thread

    def _listen(self, ready: threading.Event) -> None:
        try:
            for line in self._lines():
                self._take(json.loads(line), ready)
        except (OSError, ValueError):
            pass
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        self._fail_all()
        self._closing.close()
        self._sock.close()
        ready.set()  # last: who waits for it finds nothing left

    def _lines(self) -> Iterator[bytes]:
        """What it says, until it ends. That may be seen by its process only: a child that was forked while it was being
        started holds its end of the socket too."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        with suppress(OSError):  # no pidfds here: then its end of the socket has to do
            pidfd = os.pidfd_open(self.process.pid)
            self._closing.callback(os.close, pidfd)
            poll.register(pidfd, select.POLLIN)
        rest = b""
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._sock.fileno() not in ready:
                return
            data = self._sock.recv(1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines

    def _take(self, reply: dict[str, Any], ready: threading.Event) -> None:
        if reply["kind"] == "ready":
            ready.set()
            return
        with self._lock:
            pending = next((one for one in self._queue if one.request["save"] == reply["save"]), None)
            if pending is None:
                return  # given up already
            if reply["kind"] == "progress":
                pending.written = reply["written"]
                return
            self._queue.remove(pending)
        if reply["kind"] == "done":
            pending.written = pending.total
        pending.end({int(rank): why for rank, why in reply.get("causes", {}).items()})

    def _fail_all(self) -> None:
        """It has ended: of what it still had nothing will be said any more."""
        with self._lock:
            self._ended = True
            lost, self._queue = self._queue, []
        for pending in lost:
            _give_up(pending, self._rank, self._how_it_ended())

    def _how_it_ended(self) -> str:
        return self._why or f"its writer process ended before the save did{_how(self.process)}"


def _give_up(pending: PendingSave, rank: int, why: str) -> None:
    """End a save of which no writer will say anything. The other ranks' writers learn it by a file, as from ours."""
    request = pending.request
    temporary = Path(request["folder"]) / temporary_name(request["step"], request["save"])
    if request["ranks"] > 1:
        with suppress(OSError):
            temporary.mkdir(parents=True, exist_ok=True)
            if rank:
                value: dict[str, Any] = {"files": [], "error": why}
                name = report_name(rank)
            else:
                value, name = {"causes": {"0": why}}, FAILED
            write_whole(temporary / name, json.dumps({"save": request["save"], **value}).encode())
    pending.end({rank: why})


def wait_all(writer: WriterProcess, pendings: list[PendingSave], timeout_s: float | None) -> None:
    """Raises DeadlineError if they have not ended after `timeout_s`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    for pending in pendings:
        left = None if until is None else max(until - time.monotonic(), 0)
        if not writer.wait(pending, left):
            raise DeadlineError(
                f"waited {timeout_s or 0:g} s for the writer of rank {writer.rank} to save step {pending.step}: "
                f"{pending.written:,} of {pending.total:,} bytes are written"
            )


def _ended(pending: PendingSave, timeout_s: float) -> bool:
    """Wait for it. Not by the event's own wait, which holds a lock that a signal handler may want too."""
    until, pause = time.monotonic() + timeout_s, 0.0005
    while not pending.ended.is_set():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.3, 0.01)
    return True


def _left(deadline: float, timeout_s: float | None) -> float:
    left = max(deadline - time.monotonic(), 0)
    return left if timeout_s is None else min(left, timeout_s)


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return ""
    if code >= 0:
        return f" (exit status {code})"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel's log tells whether memory ran out" if -code == signal.SIGKILL else ""
    return f" (killed by {name}{hint})"


def _environment() -> dict[str, str]:
    """Without the token: the writer talks to nobody but us."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_TOKEN")}
