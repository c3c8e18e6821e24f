"""Training scripts of examples/ that are killed with SIGKILL in mid-run and started again, and what they logged.

The ranks are forked from one interpreter that has imported torch and has one thread, for the import takes three seconds
of a core; each gets the variables that torchrun would set, and runs the script's module as `python -m` would. A script
logs a line of JSON for each step and rank, at the end of OUT/*.jsonl.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
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

__all__ = ["ENDLESS", "Line", "Lines", "Training"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMPORTED = (
    "torch._dynamo",  # which FSDP2 imports when it is used, in each rank
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "penstock.client.checkpoint",
    "penstock.worker.datasets",
)
ENDLESS = 1_000_000
"""Steps of a run that is to be killed: no machine is so fast that it ends before."""
DEADLINE_S = 120.0

Line = dict[str, Any]
Lines = dict[str, list[Line]]
"""By the name of a rank's log."""

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


class Training:
    """A script in a folder of its own, which is started any number of times."""

    def __init__(self, module: str, out: Path, environment: Mapping[str, str]) -> None:
        """`environment`: what it gets besides torchrun's variables."""
        self.module, self.out = module, out
        self.environment = environment
        out.mkdir(parents=True)

    def to_the_end(self, ranks: int, *options: str, steps: int) -> Lines:
        """One start, up to this step; what it logged."""
        launched = self._launch(ranks, *options, "--steps", str(steps))
        try:
            deadline = time.monotonic() + DEADLINE_S
            said = [one.last_words(deadline) for one in launched]
        finally:
            self._kill(launched)
        assert said == ["ended well"] * ranks, "\n".join(said)
        return self._logged()

    def killed(self, ranks: int, *options: str, at: int) -> Lines:
        """One start, killed when each rank has logged this step; what it had logged."""
        launched = self._launch(ranks, *options, "--steps", str(ENDLESS))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while [log[-1]["step"] for log in _read(self.out).values() if log and log[-1]["step"] >= at][
                ranks - 1 :
            ] == []:
                over = [one.last_words(0) for one in launched if one.is_over]
                assert not over, "\n".join(over)
                assert time.monotonic() < deadline, f"{self.module} is at {_read(self.out)}"
                time.sleep(0.005)
        finally:
            self._kill(launched)
        assert [one.last_words(deadline) for one in launched] == ["killed"] * ranks
        return self._logged()

    def by_torchrun(self, ranks: int, *options: str, steps: int) -> Lines:
        """As `to_the_end`, but started as a user would."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", self.module, *options, "--steps", str(steps), "--out", str(self.out)]
        environment = {**os.environ, **_paths(), **self.environment, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        return self._logged()

    def _launch(self, ranks: int, *options: str) -> list[_Rank]:
        arguments = [*options, "--out", str(self.out)]
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo", **self.environment}
        return [
            _fork(self.module, arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]

    @staticmethod
    def _kill(launched: Sequence[_Rank]) -> None:
        for one in launched:
            with contextlib.suppress(ProcessLookupError):  # it is over
                os.killpg(one.pid, signal.SIGKILL)

    def _logged(self) -> Lines:
        """What the logs have; they are removed, so that the next start's are its own."""
        found = _read(self.out)
        for name in found:
            (self.out / name).unlink()
        return found


def _read(out: Path) -> Lines:
    """The whole lines: a rank may have been killed while it wrote one."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in sorted(out.glob("*.jsonl"))
    }


# ---- the ranks


@dataclass
class _Rank:
    """A process that was forked for one rank."""

    pid: int
    """And its process group."""
    end: int
    """The read end of the pipe by which it says how it ended."""
    said: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.said or select.select([self.end], [], [], 0)[0])

    def last_words(self, deadline: float) -> str:
        """ "ended well", a traceback, or "killed"."""
        if not self.said:
            text = b""
            while select.select([self.end], [], [], max(0.0, deadline - time.monotonic()))[0]:
                piece = os.read(self.end, 1 << 16)
                if not piece:
                    self.said = text.decode() or "killed"
                    os.close(self.end)
                    return self.said
                text += piece
            return f"not over in time {text.decode()}"
        return self.said


def _fork(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> _Rank:
    control = _started()
    read, write = os.pipe()
    request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
    socket.send_fds(control, [json.dumps(request).encode()], [write])
    os.close(write)
    assert select.select([control], [], [], DEADLINE_S)[0], "the interpreter that ranks are forked from does not answer"
    pid = control.recv(32)
    assert pid, "the interpreter that ranks are forked from has ended"
    return _Rank(int(pid), read)


def _started() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "kill_and_resume", str(theirs.fileno())],
                env={**os.environ, **_paths(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
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


def _paths() -> dict[str, str]:
    paths = [str(EXAMPLES), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _serve(control: socket.socket) -> NoReturn:
    for name in IMPORTED:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    while True:
        data, handles, _, _ = socket.recv_fds(control, 1 << 20, 1)
        with contextlib.suppress(ChildProcessError):  # there is none; how they ended they say themselves
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not data:
            os._exit(0)  # to take down what was imported would take a second of a core
        pid = os.fork()
        if pid == 0:
            control.close()
            _work(json.loads(data), handles[0])
        os.close(handles[0])
        os.setpgid(pid, pid)  # before anybody hears of it who may kill it
        control.send(str(pid).encode())


def _work(request: dict[str, Any], end: int) -> None:
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        said = "ended well"
    except BaseException:
        said = traceback.format_exc()
    with os.fdopen(end, "wb") as pipe:
        pipe.write(said.encode())
    sys.stdout.flush()
    os._exit(0)  # the interpreter that was forked has nothing to put in order


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
