"""Processes that are forked from one interpreter, which has imported torch: that takes two seconds of a core, and
frameworks on top of it as much again.

The interpreter is started when the first process is asked for, and imports then what that one needs. It has one thread
and uses nothing of gRPC or of a checkpointer, so what is forked from it may use both.
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
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["EXAMPLES", "Forked", "Outcome", "fork"]

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
DEADLINE_S = 120.0

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a process."""

    value: Any = None
    """What its function returned, as JSON has it."""
    raised: str = ""
    """The name of the class of what it raised; "killed" for a process that ended without a word."""
    message: str = ""


class Forked:
    """A process, which leads a group of its own."""

    def __init__(self, pid: int, end: int) -> None:
        """`end`: what it reads its outcome from."""
        self.pid = pid
        self._end = end
        self._outcome: Outcome | None = None

    def fileno(self) -> int:
        """To wait for its end with select."""
        return self._end

    @property
    def is_over(self) -> bool:
        return self._outcome is not None or bool(select.select([self._end], [], [], 0)[0])

    def outcome(self, deadline: float) -> Outcome:
        """deadline: of time.monotonic(). Raises TimeoutError."""
        data = b""
        while self._outcome is None:
            if not select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("a process did not end in time")
            piece = os.read(self._end, 1 << 16)
            data += piece
            if not piece:
                os.close(self._end)
                self._outcome = Outcome(**json.loads(data)) if data else Outcome(raised="killed")
        return self._outcome

    def kill(self) -> None:
        """With its group."""
        with contextlib.suppress(ProcessLookupError):  # it is over
            os.killpg(self.pid, signal.SIGKILL)


def fork(
    function: str, *arguments: Any, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Forked:
    """A process that calls the function.

    function: "module:name", called with `arguments`, which are JSON. imports: modules that the interpreter imports
    before it forks, besides the function's. environment: that the process gets besides ours.
    """
    control = _started()
    read, write = os.pipe()
    request = {"function": function, "arguments": arguments, "imports": imports, "environment": environment or {}}
    socket.send_fds(control, [json.dumps(request).encode()], [write])
    os.close(write)
    assert select.select([control], [], [], DEADLINE_S)[0], "the interpreter that is to be forked does not answer"
    pid = control.recv(32)
    assert pid, "the interpreter that is to be forked has ended"
    return Forked(int(pid), read)


def _started() -> socket.socket:
    global _server
    if _server is None:
        paths = [str(EXAMPLES), str(HERE), str(HERE.parent / "inputs"), *filter(None, [os.environ.get("PYTHONPATH")])]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "warm", str(theirs.fileno())],
                env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        _server = process, ours
    return _server[1]


@atexit.register
def _stop() -> None:
    if _server is not None:
        _server[1].close()
        _server[0].wait(10)


def _serve(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they say themselves how it went
    gc.disable()  # but in what is forked: to walk what is imported would take longer than to import it
    while True:
        data, handles, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            os._exit(0)  # to take down what was imported would take a second of a core
        request = json.loads(data)
        for name in (*request["imports"], request["function"].partition(":")[0]):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # no process that is forked walks it, or copies its pages
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            gc.enable()
            control.close()
            _work(request, handles[0])
        os.close(handles[0])
        with contextlib.suppress(ProcessLookupError):  # it is over
            os.setpgid(pid, pid)  # before anybody hears of it who may kill it
        control.send(str(pid).encode())


def _work(request: dict[str, Any], end: int) -> NoReturn:
    status = 1
    os.environ.update(request["environment"])
    module, _, name = request["function"].partition(":")
    try:
        found = {"value": getattr(sys.modules[module], name)(*request["arguments"])}
        status = 0
    except BaseException as error:
        traceback.print_exc()
        found = {"raised": type(error).__name__, "message": str(error)}
    with os.fdopen(end, "wb") as pipe:
        pipe.write(json.dumps(found).encode())
    sys.stdout.flush()
    os._exit(status)  # the interpreter that was forked has nothing to put in order


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
