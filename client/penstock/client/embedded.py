"""Coordinator and worker daemon as children of the training process: started by `Appliance()` without an address.

The two are started at the same time and communicate over a Unix socket in a folder that is private to this user. So no
port can be in use already, and no other user can take the socket's name first. The last process to end removes the
folder. The daemons have a session of their own: a Ctrl-C in the terminal reaches only the training script, which may
still save its state. Both watch this process by its pidfd and end with it, also when it is killed; the worker watches
its coordinator too.

The daemons' output, including that of user code in the runners, goes through a pipe to this process's stderr. The last
lines are kept for the error of a daemon that does not start. The one thread of this module forwards those lines and
detects a daemon's death.

The packages of the client, the coordinator and the worker never import each other. Only this module depends on the
other two, and only by the names of their modules on a command line.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.proto.errors import PenstockError
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import NULL, TORCHRUN, Spawned, environment, module, spawn
from penstock.runtime.process.watch import readable, wait_for_any

__all__ = ["Embedded"]

SLOTS = 1024
"""Worker slots of the embedded daemon: the largest number that a coordinator accepts from one worker."""
TAIL_LINES = 40
STOP_S = 5.0
"""Seconds for a daemon to end after SIGTERM."""
PROBE_S = 0.01

NO_CAGE = "PENSTOCK_WORKER_NO_CAGE"
"""Environment variable that turns off an embedded worker's sandbox, like `penstock worker --no-cage`."""
_NOT_FOR_DAEMONS = (*TORCHRUN, "TORCH_NCCL_*", "PENSTOCK_*", "PYTHONHASHSEED")
"""Environment variables of the training process that the daemons do not inherit."""


class Embedded:
    """The two daemons. `close` is idempotent and does nothing in a forked child.

    on_death: callback that is called when a daemon ends before `close`; runs in this object's thread.
    """

    def __init__(self, on_death: Callable[[PenstockError], None]) -> None:
        try:
            self._folder = PrivateFolder()
        except OSError as error:
            raise PenstockError(
                f"Appliance(): the coordinator's socket needs a folder in {tempfile.gettempdir()}, which cannot be "
                f"created: {error}; set TMPDIR to a folder that this user can write to"
            ) from error
        self._socket = str(self._folder.path / "coordinator")
        self.address = f"unix:{self._socket}"
        self.token = secrets.token_urlsafe(24)
        self._pid = os.getpid()
        self._on_death = on_death
        self._closing = False
        self._down = threading.Event()
        self._failure: PenstockError | None = None
        self._lock = threading.Lock()
        parent_watch = ["--parent-pid", str(self._pid)]
        self._children: list[_Child] = []
        try:
            folder = self._folder.fileno()
            cluster = ["--listen", self.address, "--state-dir", ":memory:", "--folder-fd", str(folder)]
            self._children.append(self._start("coordinator", "penstock.appliance", [*cluster, *parent_watch], [folder]))
            parent_watch += ["--parent-pid", str(self._children[0].process.pid)]
            what = ["--coordinator", self.address, "--slots", str(SLOTS), "--allow", "*", "--embedded"]
            if os.environ.get(NO_CAGE, "").lower() in ("1", "true", "yes", "on"):
                what.append("--no-cage")
            self._children.append(self._start("worker daemon", "penstock.worker", [*what, *parent_watch]))
        except BaseException:
            for child in self._children:
                child.process.kill()
                child.process.wait()
                child.close()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._attend, name="penstock-embedded", daemon=True)
        self._thread.start()

    def _start(self, title: str, name: str, arguments: list[str], fds: Sequence[int] = ()) -> _Child:
        if not sys.executable:
            raise PenstockError(
                "Appliance(): sys.executable is empty, so the daemons cannot be started; give an address"
            )
        out = LinePipe()
        try:
            process = spawn(
                module(name, *arguments),
                stdout=out.theirs if name == "penstock.worker" else NULL,
                stderr=out.theirs,
                fds=fds,
                env=environment(*_NOT_FOR_DAEMONS) | {"PENSTOCK_TOKEN": self.token},
            )
        except BaseException:
            out.close()
            raise
        return _Child(title, process, out)

    # ---- starting

    def wait_until_up(self, deadline: float) -> None:
        """Wait until the coordinator answers. Raises PenstockError with a daemon's last output if one ended.

        deadline: a time.monotonic().
        """
        while True:
            if self._failure is not None:
                raise self._failure
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(self._socket)
                    return
                except OSError:
                    pass
            if time.monotonic() > deadline:
                raise PenstockError(
                    "the embedded coordinator did not accept connections within timeout_s"
                    f"{self._children[0].last_words()}"
                )
            self._down.wait(PROBE_S)

    # ---- the thread

    def _attend(self) -> None:
        """Forward the daemons' output to stderr until both have ended."""
        outputs = {child.out.fileno(): child for child in self._children}
        alive = {child.process.fileno(): child for child in self._children}
        while alive:
            for fd in wait_for_any([*outputs, *alive]):
                if fd in outputs:
                    if not outputs[fd].forward():
                        del outputs[fd]
                    continue
                alive.pop(fd).process.wait()
                # The worker ends with its coordinator, and the worker's end may be detected first.
                self._ended(next(other for other in self._children if other.process.ended))

    def _ended(self, child: _Child) -> None:
        if self._closing or self._failure is not None:
            return
        child.read_rest()
        how = exit_words(child.process.result())
        self._failure = PenstockError(f"the embedded {child.title} {how}{child.last_words()}")
        self._down.set()
        self._on_death(self._failure)

    # ---- closing

    def let_go(self) -> None:
        """Send SIGTERM to both daemons without waiting. For a finalizer, which may run in the garbage collector."""
        if os.getpid() == self._pid and not self._closing:
            self._closing = True
            for child in self._children:
                child.process.send(signal.SIGTERM)

    def close(self) -> None:
        """Stop both daemons and wait for them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        # Stop the worker first, because it deregisters from the coordinator.
        for child in reversed(self._children):
            child.process.end(STOP_S)
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        for child in self._children:
            child.close()
        self._folder.close()


class _Child:
    """A daemon and its output pipe."""

    def __init__(self, title: str, process: Spawned, out: LinePipe) -> None:
        self.title = title
        self.process = process
        self.out = out
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def forward(self) -> bool:
        """Forward the lines that have arrived. Return False at the end of the output."""
        for line in self.out.read():
            text = line.decode(errors="backslashreplace")
            self._tail.append(text)
            try:
                print(text, file=sys.stderr, flush=True)
            except (OSError, ValueError, AttributeError):
                pass  # stderr is closed; the kept lines have the text
        return not self.out.ended

    def read_rest(self) -> None:
        """Forward the output that was in the pipe when the process ended. Runners may still have the pipe open."""
        for _ in range(TAIL_LINES):
            if not readable(self.out.fileno(), 0) or not self.forward():
                return

    def last_words(self) -> str:
        """Return the last lines of output, for an error."""
        lines = [*self._tail, self.out.rest.decode(errors="backslashreplace")] if self.out.rest else [*self._tail]
        return ":\n" + "\n".join(lines) if lines else " without output"

    def close(self) -> None:
        """Close the process handle and the pipe, once the process has ended."""
        self.process.close()
        self.out.close()
