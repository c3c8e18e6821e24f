"""Processes that are forked from an interpreter which has imported what they need: real to stop and to kill. What is
imported costs processor time once and not in each: torch two seconds, a framework as much again, gRPC a third of one.

An interpreter has one thread, uses nothing of gRPC or of a checkpointer, and only forks. A test sees a child's end by a
pipe, for it is no child of its own: the interpreter collects it and tells its status.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["EXAMPLES", "Forked", "let_go", "start"]

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
PATHS = [
    str(EXAMPLES),
    str(HERE),
    *(str(HERE.parent / name) for name in ("inputs", "model")),
    *filter(None, [os.environ.get("PYTHONPATH")]),
]
DEADLINE_S = 120.0
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SIZE = 1 << 20
"""Bytes of a request: an environment and arguments."""


class Forked:
    """Process with the part of Popen's interface that tests use."""

    def __init__(self, pid: int, ended: int, stdout: int | None, stderr: int | None) -> None:
        """`ended`: the read end of the pipe that its status comes by; `stdout`, `stderr`: of its output, if piped."""
        self.pid = pid
        self.stdout = None if stdout is None else FileIO(stdout)
        self.stderr = None if stderr is None else FileIO(stderr)
        self.returncode: int | None = None
        self._ended = ended

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at the process's end, for select."""
        return self._ended

    def poll(self) -> int | None:
        """Its status if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout or 0)
            said = os.read(self._ended, 32)
            os.close(self._ended)
            assert said, "the interpreter that it was forked from has ended"
            self.returncode = int(said)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its status is under way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Interpreter:
    """Interpreter that processes are forked from."""

    def __init__(self, python: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A request is one packet, whatever the system's usual buffer.
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SIZE)
        with theirs:
            self._process = subprocess.Popen(
                [*python, "-m", "interpreters", str(theirs.fileno())],
                # Without threads of libraries: one that has any cannot be forked.
                env={**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": os.pathsep.join(PATHS)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # In our process group: what is not is an orphan for a fork server that a test starts here.
            )

    def start(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        if not select.select([self._control], [], [], DEADLINE_S)[0]:
            raise TimeoutError("the interpreter that processes are forked from does not answer")
        pid = self._control.recv(32)
        assert pid, "the interpreter that processes are forked from has ended"
        return int(pid)

    def close(self) -> None:
        """End it, and what it forked."""
        self._control.close()
        self._process.wait(10)


_interpreters: dict[tuple[str, ...], _Interpreter] = {}
_starting = threading.Lock()


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    imports: Sequence[str],
    torch: bool = True,
    python: Sequence[str] = (sys.executable,),
    ready: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: str = "",
) -> Forked:
    """A process that calls the module's main() with these arguments, under the name of the module's package.

    imports: modules that the interpreter imports before it forks, besides that one. torch: from the interpreter that
    has torch. python: the interpreter, and what goes before it. ready: a descriptor that the process gets by
    --ready-fd. stdout, stderr: as Popen has them. cwd: its working directory; empty for ours.
    """
    key = (*python, "torch" if torch else "")
    request = {"module": module, "arguments": [*arguments], "environment": {**environment}, "imports": [*imports]}
    request["cwd"] = cwd
    with contextlib.ExitStack() as closing:

        def pipe() -> tuple[int, int]:
            read, write = os.pipe()
            closing.callback(os.close, write)
            return read, write

        ended, end = pipe()
        out, its_out = pipe() if stdout == subprocess.PIPE else (None, 1 if stdout is None else stdout)
        error, its_error = pipe() if stderr == subprocess.PIPE else (None, 2 if stderr is None else stderr)
        fds = [end, its_out, its_error, *([] if ready is None else [ready])]
        with _starting:
            if key not in _interpreters:
                _interpreters[key] = _Interpreter(python)
            return Forked(_interpreters[key].start(request, fds), ended, out, error)


def let_go(python: Sequence[str]) -> None:
    """End such interpreters, and what they forked."""
    for key in [key for key in _interpreters if key[: len(python)] == tuple(python)]:
        _interpreters.pop(key).close()


atexit.register(let_go, ())


def _serve(control: socket.socket) -> NoReturn:
    """Fork a process for each request."""
    gc.disable()  # but in what is forked: to walk what is imported would take longer than to import it
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this
    signal.set_wakeup_fd(woken)
    ends: dict[int, int] = {}
    while True:
        readable = select.select([control.fileno(), wake], [], [])[0]
        if wake in readable:
            os.read(wake, 4096)
            _tell_ends(ends)
        if control.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(control, _SIZE, 4)
            if not data:
                for pid in ends:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            request = json.loads(data)
            for name in (*request["imports"], request["module"]):
                importlib.import_module(name)
            gc.freeze()  # no process that is forked walks what is imported, or copies its pages
            assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
            pid = os.fork()
            if not pid:
                gc.enable()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for fd in (wake, woken, *ends.values()):
                    os.close(fd)
                control.close()
                _work(request, *fds)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is over, or was quicker
                os.setpgid(pid, pid)
            ends[pid], *others = fds
            for fd in others:
                os.close(fd)
            control.send(str(pid).encode())


def _work(request: dict[str, Any], end: int, stdout: int, stderr: int, ready: int | None = None) -> NoReturn:
    status: Any = 1
    try:
        os.setpgid(0, 0)  # as a service manager starts it; and a test may kill it with its group
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (end, stdout, stderr):
            os.close(fd)
        # New ones, for those of the interpreter know by now what kind of file they write to.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if request["cwd"]:
            os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        given = [] if ready is None else ["--ready-fd", str(ready)]
        sys.argv = [request["module"].partition(".")[0], *request["arguments"], *given]
        status = sys.modules[request["module"]].main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status or 0)  # to take down what was imported would take a second of a core


def _tell_ends(ends: dict[int, int]) -> None:
    for pid in list(ends):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end = ends.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
