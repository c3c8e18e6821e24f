"""The training process's side of its writer: starts it, hands it saves, learns how they ended, and ends it.

A thread reads the writer's replies, so that a save that failed is known, and told to the other ranks, while the loop
trains. Nothing is waited for without a deadline: a writer that dies is seen by the end of its socket, one that hangs is
killed when its save's time is up, and the next save starts another one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock.proto
from penstock.client.checkpoint.image import Image
from penstock.client.checkpoint.staging import Buffer
from penstock.proto.checkpoints import temporary_name
from penstock.proto.errors import CheckpointError, DeadlineError
from penstock.proto.whole_files import write_whole

__all__ = ["Pending", "WriterProcess", "wait_all"]

_log = logging.getLogger("penstock.checkpoint")

LENGTH = 8
START_S = 30.0
"""Seconds for the process to answer; it takes 0.1 on an idle machine."""
GRACE_S = 10.0
"""Seconds beyond a save's deadline: the writer gives up by itself, and says so, unless it hangs."""
LEAVE_S = 5.0
"""Seconds for a writer without work to leave."""


class Pending:
    """A save that was handed to the writer."""

    def __init__(self, request: dict[str, Any], buffer: Buffer) -> None:
        self.request = request
        self.buffer = buffer
        """Whose image it is written from; in use until it has ended."""
        self.step: int = request["step"]
        self.written = 0
        """Bytes that this rank has written."""
        self.error: CheckpointError | None = None
        self.ended = threading.Event()
        self.deadline = time.monotonic() + request["timeout_s"] + GRACE_S

    @property
    def total(self) -> int:
        """Bytes that this rank writes."""
        return sum(size for _, _, size in self.request["files"])

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
            _log.warning("%s", self.error.message)
        self.ended.set()


class WriterProcess:
    """One rank's writer. `submit` starts one if none runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._queue: list[Pending] = []
        """Handed over and not ended, in the order in which they are written."""
        self._mapped: set[int] = set()
        """Numbers of the images that the running writer has."""

    @property
    def pid(self) -> int | None:
        """Of the running writer."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Have a writer running, and ready. Raises CheckpointError if none can be started."""
        with self._lock:
            self._start()

    def submit(self, pending: Pending, image: Image | None, images: Iterable[Image]) -> None:
        """Hand over a save.

        image: what its files lie in; None for a save that failed here and is only told to the other ranks.
        images: all that are in use, this one too.
        """
        with self._lock:
            self._start()
            sock = self._sock
            assert sock is not None
            self._queue.append(pending)
            live = {one.number for one in images}
            fresh = [image.fd] if image is not None and image.number not in self._mapped else []
            self._mapped = {number for number in self._mapped if number in live} | live.intersection(
                () if image is None else [image.number]
            )
            numbers = {"image": None if image is None else image.number, "images": sorted(live)}
            data = json.dumps({**pending.request, **numbers}).encode()
            try:
                socket.send_fds(sock, [len(data).to_bytes(LENGTH)], fresh)
                sock.sendall(data)
            except OSError:
                pass  # it has gone; the thread that reads its replies sees that too, and ends what is queued

    def wait(self, pending: Pending, timeout_s: float | None = None) -> bool:
        """Until a save has ended; kills a writer that lets the save's deadline pass. False if `timeout_s` was over."""
        if pending.ended.wait(_left(pending.deadline, timeout_s)):
            return True
        if time.monotonic() < pending.deadline:
            return False
        self.kill(f"its writer did not answer within {pending.request['timeout_s'] + GRACE_S:g} s, and was killed")
        return pending.ended.wait(LEAVE_S)

    def kill(self, why: str) -> None:
        """End the writer at once, and with it what it has not saved yet."""
        with self._lock:
            process, self._process, self._sock = self._process, None, None  # the next save starts another
            queued = list(self._queue)
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
        for pending in queued:
            self._fail(pending, why)

    def stop(self) -> None:
        """End a writer that has nothing to do any more. It is killed if it does not leave."""
        with self._lock:
            process, self._process, sock, self._sock = self._process, None, self._sock, None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        if process is not None:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it goes when it gets out
                    process.wait(LEAVE_S)

    # ---- starting

    def _start(self) -> None:
        if self.pid is not None and self._sock is not None:
            return
        self._mapped = set()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # By path, for `-m` would import penstock.client and with it torch; -P keeps that path's folder off sys.path,
        # where our module names would hide others.
        roots = [str(Path(path).parent) for path in penstock.__path__]
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", str(Path(__file__).with_name("writer.py"))),
                    *("--socket-fd", str(theirs.fileno()), "--lifeline-pid", str(os.getpid())),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_environment(), "PYTHONPATH": os.pathsep.join([*roots, *_python_path()])},
                start_new_session=True,  # whoever ends the training job's processes lets a save be finished
            )
        except OSError as error:
            ours.close()
            raise CheckpointError(f"rank {self.rank}: no writer process could be started: {error}") from error
        finally:
            theirs.close()
        self._process, self._sock = process, ours
        ready = threading.Event()
        threading.Thread(
            target=self._listen, args=(process, ours, ready), name="penstock-checkpoint", daemon=True
        ).start()
        if not ready.wait(START_S) or process.poll() is not None:
            process.kill()
            raise CheckpointError(
                f"rank {self.rank}: the writer process did not start{_how(process)}; see its standard error"
            )

    # ---- the thread

    def _listen(self, process: subprocess.Popen[bytes], sock: socket.socket, ready: threading.Event) -> None:
        try:
            with sock.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line), ready)
        except (OSError, ValueError):
            pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
        ready.set()
        with self._lock:
            lost = list(self._queue)
            if self._process is process:
                self._process = self._sock = None
        sock.close()
        for pending in lost:
            self._fail(pending, f"its writer process ended before the save did{_how(process)}")

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

    def _fail(self, pending: Pending, why: str) -> None:
        """A save that the writer will say nothing of any more. The other ranks' writers learn it by a file."""
        with self._lock:
            if pending not in self._queue:
                return
            self._queue.remove(pending)
        request = pending.request
        temporary = Path(request["folder"]) / temporary_name(request["step"], request["save"])
        if request["ranks"] > 1:
            with suppress(OSError):
                temporary.mkdir(parents=True, exist_ok=True)
                if self.rank:
                    value: dict[str, Any] = {"files": [], "error": why}
                    name = f"rank-{self.rank}.json"
                else:
                    value, name = {"causes": {"0": why}}, "failed.json"
                write_whole(temporary / name, json.dumps({"save": request["save"], **value}).encode())
        pending.end({self.rank: why})


def wait_all(writer: WriterProcess, pendings: list[Pending], timeout_s: float | None) -> None:
    """Raises DeadlineError if they have not ended after `timeout_s`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    for pending in pendings:
        left = None if until is None else max(until - time.monotonic(), 0)
        if not writer.wait(pending, left):
            raise DeadlineError(
                f"waited {timeout_s:g} s for the writer of rank {writer.rank} to save step {pending.step}: "
                f"{pending.written:,} of {pending.total:,} bytes are written"
            )


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


def _python_path() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH")]))
