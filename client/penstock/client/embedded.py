"""Coordinator and worker daemon as children of the training process: what `Appliance()` without an address starts.

The two are started side by side and meet at a Unix socket in a folder that is this user's alone: there is no port to
collide, and no stranger can take the name first. Whoever is left last removes the folder. They have a session of their
own: a Ctrl-C in the terminal reaches the training script, which may still want to save its state, and not them. Both
watch this process by its pidfd and end with it, also when it is killed; the worker watches its coordinator too.

What they print, user code in the runners included, comes out at this process's stderr by way of a pipe, whose last
lines are kept: a daemon that does not start is explained by them. The one thread of this module moves those lines and
notices a daemon's death.

The roles never import each other; this module alone knows that the other two exist, and only by the names of their
modules on a command line.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.proto.errors import PenstockError
from penstock.runtime.files.private_folders import PrivateFolder

__all__ = ["Embedded"]

SLOTS = 4096
"""As many as anyone would run on one machine: here the machine is the limit, not a number."""
TAIL_LINES = 40
STOP_S = 5.0
"""Seconds for a daemon to end after SIGTERM."""
PROBE_S = 0.01

# What torchrun and Penstock's own settings tell the training process is not meant for its daemons.
NO_CAGE = "PENSTOCK_WORKER_NO_CAGE"
"""The setting of `penstock worker --no-cage`, which an embedded worker has no flag for."""
_DROPPED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "PENSTOCK_", "GROUP_", "ROLE_", "LOCAL_")
_DROPPED = frozenset(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONHASHSEED"))


class Embedded:
    """The two daemons. `close` is idempotent and does nothing in a forked child.

    on_death: called, from this object's thread, when a daemon ends before `close`.
    """

    def __init__(self, on_death: Callable[[PenstockError], None]) -> None:
        try:
            self._folder = PrivateFolder()
        except OSError as error:
            raise PenstockError(
                f"Appliance(): the coordinator's socket needs a folder in {tempfile.gettempdir()}, and there can be "
                f"none: {error}; set TMPDIR to a folder that this user can write to"
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
                child.drop()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._attend, name="penstock-embedded", daemon=True)
        self._thread.start()

    def _start(self, title: str, module: str, arguments: list[str], fds: Sequence[int] = ()) -> _Child:
        if not sys.executable:
            raise PenstockError(
                "Appliance(): sys.executable is empty, so the daemons cannot be started; give an address"
            )
        out, write = os.pipe2(os.O_CLOEXEC)
        try:
            # -P: a file of the user's in the working directory must not stand in for a module of ours or of the
            # library.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=write if module == "penstock.worker" else subprocess.DEVNULL,
                stderr=write,
                env=self._environment(),
                pass_fds=fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(write)
        return _Child(title, process, out)

    def _environment(self) -> dict[str, str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
        }
        env["PENSTOCK_TOKEN"] = self.token
        return env

    # ---- starting

    def wait_until_up(self, deadline: float) -> None:
        """Returns when the coordinator answers. Raises PenstockError with a daemon's last output if one ended.

        deadline: time.monotonic().
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
                raise PenstockError(f"the embedded coordinator did not start in time{self._children[0].last_words()}")
            self._down.wait(PROBE_S)

    # ---- the thread

    def _attend(self) -> None:
        """Move what the daemons print to stderr, until both are gone."""
        poll = select.poll()
        by_fd: dict[int, _Child] = {}
        for child in self._children:
            for fd in (child.out, child.pidfd):
                poll.register(fd, select.POLLIN)
                by_fd[fd] = child
        alive = len(self._children)
        while alive:
            for fd, _ in poll.poll():
                child = by_fd[fd]
                if fd == child.out:
                    if not child.forward():
                        poll.unregister(fd)
                    continue
                poll.unregister(fd)
                alive -= 1
                child.process.wait()
                # The worker ends with its coordinator, and may be the first to be noticed.
                self._ended(next(other for other in self._children if other.has_ended()))

    def _ended(self, child: _Child) -> None:
        code = child.process.wait()
        if self._closing or self._failure is not None:
            return
        child.read_rest()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        self._failure = PenstockError(f"the embedded {child.title} {how}{child.last_words()}")
        self._down.set()
        self._on_death(self._failure)

    # ---- the end

    def let_go(self) -> None:
        """Ask both to end, and do not wait: for a finalizer, which may run in the garbage collector."""
        if os.getpid() == self._pid and not self._closing:
            self._closing = True
            for child in self._children:
                child.ask_to_end()

    def close(self) -> None:
        """Stop both and wait for them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        # The worker first: it tells the coordinator that it leaves.
        for child in reversed(self._children):
            child.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        for child in self._children:
            child.drop()
        self._folder.close()


class _Child:
    def __init__(self, title: str, process: subprocess.Popen[bytes], out: int) -> None:
        self.title = title
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.out = out
        """Where it prints to."""
        os.set_blocking(self.out, False)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._part = b""

    def forward(self) -> bool:
        """Pass on what there is. False at the end."""
        try:
            data = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return False
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="backslashreplace")
            self._tail.append(text)
            try:
                print(text, file=sys.stderr, flush=True)
            except (OSError, ValueError, AttributeError):
                pass  # stderr is closed; the tail still has it
        return True

    def read_rest(self) -> None:
        """What was in the pipe when the process ended; runners may still hold it open."""
        for _ in range(TAIL_LINES):
            if not select.select([self.out], [], [], 0)[0] or not self.forward():
                return

    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def last_words(self) -> str:
        lines = [*self._tail, self._part.decode(errors="backslashreplace")] if self._part else list(self._tail)
        return ":\n" + "\n".join(lines) if lines else " without a word"

    def ask_to_end(self) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
        except OSError:
            pass  # it has ended

    def stop(self) -> None:
        process = self.process
        if process.poll() is None:
            process.terminate()
            if not select.select([self.pidfd], [], [], STOP_S)[0]:
                process.kill()
        process.wait()

    def drop(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self.out)
            self.pidfd = self.out = -1
