"""Embedded mode: coordinator and worker daemon as one child of the training process (embedded_daemons.py), for
`Appliance()` without an address.

It listens on a Unix socket in a temporary folder private to this user, so ports cannot collide; the last of the two
processes removes the folder. No signal that is meant for the whole job ends it, because the training script may still
save: it ends with the training process, or when that asks it (lifetime.py). Its output goes through a pipe to this
process's stderr; the last lines are kept for error messages."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock.client.stream.wait_notice import say
from penstock.proto.errors import CoordinatorUnavailableError, PenstockError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.announcements import Announcement, announce, withdraw
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.identity import Identity
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import TORCHRUN, by_path, environment, spawn
from penstock.runtime.process.watch import readable, wait_for_any

DAEMONS = Path(__file__).with_name("embedded_daemons.py")
TAIL_LINES = 40
STOP_S = 8.0
PROBE_S = 0.01

NO_SANDBOX = "PENSTOCK_WORKER_NO_SANDBOX"
"""Turns off an embedded worker's sandbox, like `penstock worker --no-sandbox`."""
BUDGET = "PENSTOCK_COORDINATOR_BUDGET"
"""Most bytes of snapshots of the embedded coordinator, such as "4GiB", like `penstock coordinator --budget`."""
_NOT_FOR_DAEMONS = (*TORCHRUN, "TORCH_NCCL_*", "PENSTOCK_*", "PYTHONHASHSEED")


class Embedded:
    """Child process with both daemons. `on_death`, in a thread, gets an error if they end before `close`."""

    def __init__(self, on_death: Callable[[PenstockError], None]) -> None:
        if not sys.executable:
            raise PenstockError("Appliance(): sys.executable must be the path of Python, got an empty one")
        self._folder = PrivateFolder()
        self._socket = str(self._folder.path / "coordinator")
        self.address = f"unix:{self._socket}"
        self.token = secrets.token_urlsafe(24)
        self._command_token = secrets.token_urlsafe(24)
        """Token of the role admin for this user's commands, with which no run can be opened."""
        self._pid = os.getpid()
        self._on_death = on_death
        self._closing = False
        self._down = threading.Event()
        self.failure: PenstockError | None = None
        """Error of the daemons, if they have ended before `close`."""
        self._lock = threading.Lock()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._out = LinePipe()
        folder = self._folder.fileno()
        given = {
            "address": self.address,
            "folder_fd": folder,
            "parent_pid": self._pid,
            "no_sandbox": os.environ.get(NO_SANDBOX, "").lower() in ("1", "true", "yes", "on"),
            "budget": os.environ.get(BUDGET, ""),
        }
        try:
            self.process = spawn(
                [*by_path(DAEMONS), json.dumps(given)],
                stdout=self._out.theirs,
                stderr=self._out.theirs,
                fds=[folder],
                env=environment(*_NOT_FOR_DAEMONS) | {"PENSTOCK_TOKEN": f"{self.token}\nadmin:{self._command_token}"},
                linked=True,
            )
        except BaseException:
            self._out.close()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._attend, name="penstock-embedded", daemon=True)
        self._thread.start()

    # ---- starting

    def announce(self, job: str) -> None:
        """Write the file by which commands such as `penstock status` find the coordinator without a setting."""
        token_file = self._folder.path / "token"
        with contextlib.suppress(OSError, ProcessLookupError):
            write_whole(token_file, f"admin:{self._command_token}\n".encode(), mode=0o600, sync=False)
            announce(
                Announcement(
                    what="embedded",
                    name=job,
                    address=self.address,
                    token_file=str(token_file),
                    folder=str(self._folder.path),
                    owner=Identity.of(self.process.pid),
                )
            )

    def wait_until_up(self, deadline: float, waiting: Callable[[], None]) -> None:
        """Wait until the coordinator accepts connections. Raises PenstockError, with the daemons' last output."""
        while True:
            if self.failure is not None:
                raise self.failure
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(self._socket)
                    return
                except OSError:
                    pass
            if time.monotonic() > deadline:
                raise PenstockError(
                    f"the embedded coordinator accepts no calls after timeout_s: see its output{self._last_words()}"
                )
            waiting()
            self._down.wait(PROBE_S)

    # ---- the thread

    def _attend(self) -> None:
        """Copy the daemons' output to stderr until they have ended, in a thread."""
        watched = [self._out.fileno(), self.process.fileno()]
        while True:
            ready = wait_for_any(watched)
            if self._out.fileno() in ready and not self._forward():
                watched.remove(self._out.fileno())
            if self.process.fileno() in ready:
                break
        self.process.wait()
        self._read_rest()
        if self._closing:
            return
        how = exit_words(self.process.result())
        self.failure = PenstockError(
            f"the process of the embedded coordinator and worker {how}: see its output{self._last_words()}"
        )
        self._down.set()
        self._on_death(self.failure)

    def _forward(self) -> bool:
        """Copy the lines that have arrived. Return False at the end of the output."""
        for line in self._out.read():
            text = line.decode(errors="backslashreplace")
            self._tail.append(text)
            say(text)
        return not self._out.ended

    def _read_rest(self) -> None:
        """Copy what is in the pipe, without waiting for its end, because runners that are alive keep it open."""
        for _ in range(TAIL_LINES):
            if not readable(self._out.fileno(), 0) or not self._forward():
                return

    def _last_words(self) -> str:
        lines = [*self._tail, self._out.rest.decode(errors="backslashreplace")] if self._out.rest else [*self._tail]
        return ":\n" + "\n".join(lines) if lines else " (it wrote none)"

    # ---- closing

    def let_go(self) -> None:
        """Ask the daemons to end without waiting, because the garbage collector may call this."""
        if os.getpid() == self._pid and not self._closing:
            self._closing = True
            self.process.ask_to_end()

    def close(self) -> None:
        """Stop the daemons. May be called again; does nothing in a fork."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.process.end(STOP_S)
        withdraw(str(self._folder.path))
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        self.process.close()
        self._out.close()
        self._folder.close()


def ended_error(address: str) -> PenstockError | None:
    """Return an error if nothing listens at the Unix socket of an embedded coordinator; None if one does, or may."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog is no end
        try:
            probe.connect(address.removeprefix("unix:"))
        except (FileNotFoundError, ConnectionRefusedError):
            return CoordinatorUnavailableError(
                "the embedded coordinator of local rank 0 has ended: see that rank's messages, and start the job again"
            )
        except OSError:
            pass
    return None
