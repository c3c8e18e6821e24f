"""Training processes (tests/inputs/trainer.py) that are forked from one interpreter: real to stop and to kill, and
torch is imported once, which costs three seconds of a core, and not in each of them.

The interpreter has one thread, no gRPC that was used, and only forks. A test sees a child's end by a pipe, for it is
no child of its own: the interpreter collects it and tells its status.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import Any

__all__ = ["Trainer", "forked", "let_go", "start"]

_SIZE = 1 << 20
"""Bytes of a request: an environment and options."""


class Trainer:
    """One process, with the part of Popen's interface that tests use."""

    def __init__(self, pid: int, stdout: int, ended: int) -> None:
        """`stdout`, `ended`: the read ends of its output, and of the pipe that its status comes by."""
        self.pid = pid
        self.stdout = FileIO(stdout)
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Its status if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("trainer", timeout_s)
            said = os.read(self._ended, 32)
            os.close(self._ended)
            assert said, "the interpreter that trainers are forked from has ended"
            self.returncode = int(said)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its status is under way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Interpreter:
    """What they are forked from."""

    def __init__(self, python: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A request is one packet, whatever the system's usual buffer.
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SIZE)
        with theirs:
            self._process = subprocess.Popen(
                [*python, "-m", "trainer", "forks", str(theirs.fileno())],
                # Without threads of libraries: one that has any cannot be forked.
                env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def start(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> Trainer:
        (output, stdout), (ended, end) = os.pipe(), os.pipe()
        try:
            request = json.dumps({"options": options, "environment": dict(environment)}).encode()
            socket.send_fds(self._control, [request], [stdout, end])
        finally:
            os.close(stdout)
            os.close(end)
        if not select.select([self._control], [], [], 60)[0]:
            raise TimeoutError("the interpreter that trainers are forked from does not answer")
        pid = self._control.recv(32)
        assert pid, "the interpreter that trainers are forked from has ended"
        return Trainer(int(pid), output, ended)

    def close(self) -> None:
        """End it, and what it forked."""
        self._control.close()
        self._process.wait(10)


_interpreters: dict[tuple[str, ...], _Interpreter] = {}


def start(python: Sequence[str], options: Mapping[str, Any], environment: Mapping[str, str]) -> Trainer:
    """A process that trains with these options. `python`: the interpreter, and what goes before it."""
    key = tuple(python)
    if key not in _interpreters:
        _interpreters[key] = _Interpreter(python, environment)
    return _interpreters[key].start(options, environment)


def let_go(python: Sequence[str]) -> None:
    """End the interpreter, if there is one, and its trainers."""
    if tuple(python) in _interpreters:
        _interpreters.pop(tuple(python)).close()


@atexit.register
def _let_all_go() -> None:
    for python in list(_interpreters):
        let_go(python)


def forked(control: socket.socket) -> dict[str, Any]:
    """In the interpreter: fork a process for each request. Returns in these only, with their options."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    ends: dict[int, int] = {}
    while True:
        ready = select.select([control.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            _tell_ends(ends)
        if control.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(control, _SIZE, 2)
            if not data:
                for pid in ends:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            stdout, end = fds
            request = json.loads(data)
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(stdout, 1)
                for fd in (stdout, end, wake, woken, *ends.values()):
                    os.close(fd)
                control.close()
                os.environ.clear()
                os.environ.update(request["environment"])
                return dict(request["options"])
            os.close(stdout)
            ends[pid] = end
            control.send(str(pid).encode())


def _tell_ends(ends: dict[int, int]) -> None:
    for pid in list(ends):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end = ends.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)
