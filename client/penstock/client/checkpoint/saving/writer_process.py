"""Handle of the training process on its writer process.

A thread reads the replies, so that a failed save is known while the loop trains. A writer that dies is detected by the
end of its socket or its pidfd; one that hangs is killed at its save's deadline, and the next save starts another."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from penstock.client.checkpoint.saving.bucket_save import tell_bucket
from penstock.client.checkpoint.saving.folder_save import tell_folder
from penstock.client.checkpoint.saving.staging import SharedImage, StagingBuffer
from penstock.client.stream import open_streams
from penstock.proto.errors import CheckpointError, DeadlineError, PenstockError
from penstock.proto.state.checkpoint_catalog import is_bucket
from penstock.proto.state.checkpoint_files import FAILED, report_name
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.line_reader import LineReader
from penstock.runtime.process.spawn import NULL, by_path, environment, spawn
from penstock.runtime.process.watch import wait_for_any
from penstock.runtime.telemetry.logs import about

_log = logging.getLogger("penstock.checkpoint")

WRITER = Path(__file__).with_name("writer.py")
LENGTH = 8
START_S = 30.0
"""On an idle machine a start takes 0.1 s."""
GRACE_S = 10.0
"""Seconds after a save's deadline, by which a writer that does not hang has reported, until it is killed."""
LEAVE_S = 5.0
"""Seconds until an idle writer that was told to end is killed."""


class PendingSave:
    def __init__(self, request: dict[str, Any], buffer: StagingBuffer) -> None:
        self.request = request
        self.buffer = buffer
        """Its data must not change until the save has ended."""
        self.step: int = request["step"]
        self.written = 0
        self.error: CheckpointError | None = None
        self.ended = threading.Event()
        self.began = time.monotonic()
        self.deadline = self.began + request["timeout_s"] + GRACE_S
        open_streams.saves.begun()

    @property
    def total(self) -> int:
        return sum(size for _, _, size, _ in self.request["files"])

    def end(self, causes: dict[int, str]) -> None:
        """Record that the save has ended. `causes`: by rank; empty if the checkpoint is complete."""
        if self.ended.is_set():
            return
        if causes:
            what = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))
            self.error = CheckpointError(
                f"step {self.step} was not saved into {self.request['address']}: {what}. Earlier checkpoints are "
                "unchanged"
            )
            _log.warning("%s", self.error.message, extra=about(step=self.step))
        seconds = time.monotonic() - self.began
        open_streams.saves.ended(self.step, seconds, self.written, ok=not causes)
        self.ended.set()


class WriterProcess:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt and call again
        self._running: _Running | None = None

    @property
    def pid(self) -> int | None:
        running = self._running
        return running.process.pid if running is not None and running.alive else None

    def start(self) -> None:
        with self._lock:
            self._start()

    def submit(self, pending: PendingSave, image: SharedImage | None, images: Iterable[SharedImage]) -> None:
        """Submit a save. `image`: its files; None: it has failed here, and the writer only tells the other ranks.
        `images`: all in use; the writer unmaps others."""
        with self._lock:
            try:
                self._start().submit(pending, image, {one.number for one in images})
            except CheckpointError as error:
                _give_up(pending, self.rank, error.message)
            except BaseException as error:
                # After an interrupt it is unknown how much of the request the writer has received, if a writer runs at
                # all.
                why = f"interrupted by {type(error).__name__} before its writer process had the request"
                self.kill(why)
                _give_up(pending, self.rank, why)
                raise

    def wait(self, pending: PendingSave, timeout_s: float | None = None) -> bool:
        """Wait for a save's end; False after `timeout_s`. At the save's own deadline the writer is killed."""
        if _ended(pending, _left(pending.deadline, timeout_s)):
            return True
        if time.monotonic() < pending.deadline:
            return False
        self.kill(f"its writer did not answer within {pending.request['timeout_s'] + GRACE_S:g} s, and was killed")
        return _ended(pending, LEAVE_S)

    def kill(self, why: str) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.kill(why)

    def stop(self, *, finish: bool = False) -> None:
        """End the writer; kill it after LEAVE_S. `finish`: return at once, it completes the submitted saves first."""
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
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._queue: list[PendingSave] = []
        """Submitted saves that have not ended, in the order in which they are written."""
        self._ended = False
        self._why = ""
        self._mapped: set[int] = set()
        try:
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise _not_started(rank, error) from error
        try:
            what = str(theirs.fileno()), str(os.getpid())
            # The writer gets no token, because it does not need one.
            env = environment("PENSTOCK_TOKEN*")
            self.process = spawn([*by_path(WRITER, xxhash), *what], fds=[theirs], stdout=NULL, env=env, outlives=True)
        except BaseException as error:
            self._sock.close()
            if not isinstance(error, OSError):  # interrupted
                raise
            raise _not_started(rank, error) from error
        ready = threading.Event()
        threading.Thread(target=self._listen, args=(ready,), name="penstock-checkpoint", daemon=True).start()
        try:
            started = ready.wait(START_S) and self.alive
        except BaseException:  # interrupted, so that no caller gets this writer: end it
            self.process.kill()
            raise
        if not started:
            self.process.kill()
            raise CheckpointError(f"rank {rank}: the writer process did not start{self._how()}: see its messages")

    @property
    def alive(self) -> bool:
        return not self._ended and self.process.status is None

    def submit(self, pending: PendingSave, image: SharedImage | None, live: set[int]) -> None:
        numbers = {"image": None if image is None else image.number, "images": sorted(live)}
        data = json.dumps({**pending.request, **numbers}).encode()
        fresh = [image.fd] if image is not None and image.number not in self._mapped else []
        self._mapped = (self._mapped & live) | ({image.number} if image is not None else set())
        with self._lock:
            lost = self._ended
            if not lost:
                self._queue.append(pending)
        if lost:
            _give_up(pending, self._rank, self._how_it_ended())
            return
        try:
            socket.send_fds(self._sock, [len(data).to_bytes(LENGTH)], fresh)
            self._sock.sendall(data)
        except OSError:
            # the writer has ended; the thread that reads its replies detects this too, and makes the queued saves fail
            pass

    def kill(self, why: str) -> None:
        with self._lock:
            self._why = why
        self.process.kill()
        self.process.wait(LEAVE_S)  # a limited wait, because a process that hangs in the kernel ends later
        self._fail_all()

    def leave(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        if not self.process.wait(LEAVE_S):
            self.kill(f"its writer did not end within {LEAVE_S:g} s")

    # ---- the thread that reads replies

    def _listen(self, ready: threading.Event) -> None:
        try:
            for line in self._lines():
                self._take(json.loads(line), ready)
        except (OSError, ValueError):
            pass
        self.process.wait(LEAVE_S)
        self._fail_all()
        self._sock.close()
        ready.set()  # the last action: code that waits for it finds everything cleaned up

    def _lines(self) -> Iterator[bytes]:
        """Yield replies until the process ends. That is watched too: a fork may hold the writer's end of the socket."""
        replies, process = LineReader(self._sock.fileno()), self.process.fileno()
        # without pidfds only the socket is watched
        watched = [replies.fileno(), process] if process >= 0 else [replies.fileno()]
        while not replies.ended and replies.fileno() in wait_for_any(watched):
            yield from replies.read()

    def _take(self, reply: dict[str, Any], ready: threading.Event) -> None:
        if reply["kind"] == "ready":
            ready.set()
            return
        with self._lock:
            pending = next((one for one in self._queue if one.request["save"] == reply["save"]), None)
            if pending is None:
                return  # the save was given up already
            if reply["kind"] == "progress":
                pending.written = reply["written"]
                return
            self._queue.remove(pending)
        if reply["kind"] == "done":
            pending.written = pending.total
            if reply["warning"]:
                _log.warning("%s", reply["warning"], extra=about(step=pending.step))
        pending.end({int(rank): why for rank, why in reply.get("causes", {}).items()})

    def _fail_all(self) -> None:
        with self._lock:
            self._ended = True
            lost, self._queue = self._queue, []
        for pending in lost:
            _give_up(pending, self._rank, self._how_it_ended())

    def _how_it_ended(self) -> str:
        how = f"its writer process ended before the save did{self._how()}: save again, which starts another one"
        return self._why or how

    def _how(self) -> str:
        status = self.process.status
        if status is None:
            return ""
        hint = "; the kernel's log shows whether memory ran out" if -status == signal.SIGKILL else ""
        return f" ({exit_words(status).removeprefix('was ')}{hint})"


def _not_started(rank: int, error: OSError) -> CheckpointError:
    return CheckpointError(f"rank {rank}: the writer process could not be started: {error}. See `ulimit -a`")


def _give_up(pending: PendingSave, rank: int, why: str) -> None:
    """Let a save fail, and tell that the other ranks' writers in place of the writer, which will not."""
    request = pending.request
    if request["ranks"] > 1:
        if rank:
            name, value = report_name(rank), {"save": request["save"], "files": [], "error": why}
        else:
            name, value = FAILED, {"save": request["save"], "causes": {"0": why}}
        with suppress(OSError, PenstockError):
            tell = tell_bucket if is_bucket(request["folder"]) else tell_folder
            tell(request, name, json.dumps(value).encode())
    pending.end({rank: why})


def wait_all(writer: WriterProcess, pendings: list[PendingSave], timeout_s: float | None) -> None:
    """Wait until all have ended. Raises DeadlineError after `timeout_s`; None: only each save's own deadline."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    for pending in pendings:
        left = None if until is None else max(until - time.monotonic(), 0)
        if not writer.wait(pending, left):
            raise DeadlineError(
                f"waited {timeout_s or 0:g} s for the writer of rank {writer.rank} to save step {pending.step}: "
                f"{pending.written:,} of {pending.total:,} bytes are written. The save continues: call wait() again"
            )


def _ended(pending: PendingSave, timeout_s: float) -> bool:
    """Poll for the end of a save: the wait() of an Event holds a lock that a signal handler may need too."""
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
