"""Processes of a demo: coordinator, worker daemons, and a training process for each box.

An operator starts these with `penstock coordinator`, `penstock worker` and torchrun; here one program starts them all,
so that it can kill some.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.proto.state.checkpoint_files import locked, newest

__all__ = ["Cluster", "DemoError", "Step", "free_port", "read_log", "saved"]

EXAMPLES = Path(__file__).resolve().parent
START_S = 300.0  # deadline of a daemon's start, or of a training's first step
STALLED_S = (
    120.0  # deadline from one step to the next, or to the end: a slow machine may take long, but must make progress
)
TELL_S = 5.0  # time between two lines about a training that goes on

Step = dict[str, Any]
"""Line of a box's log, as parsed JSON."""


class DemoError(Exception):
    """Error of a process that did not start, failed, or did not end in time."""


class Cluster:
    """Processes of a demo: a coordinator, worker daemons and training processes. Their output goes to files in
    `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._daemons: list[str] = []
        ours = ("PENSTOCK_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # The token is only in the environment: every user of the machine can read command lines.
        self.environment = {**kept, "PYTHONPATH": str(EXAMPLES), "PENSTOCK_TOKEN": secrets.token_urlsafe(24)}

    @contextlib.contextmanager
    def daemons(self, allow: str, slots: int) -> Iterator[None]:
        """Run a coordinator on a Unix socket, and two worker daemons. `allow`: prefix of the modules that the workers
        may run; `slots`: number of slots of each worker."""
        with contextlib.ExitStack() as stack:
            parent_watch = ["--parent-pid", str(os.getpid())]
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-"))
            books = ["--listen", f"unix:{private}/socket", "--state-dir", str(self.out / "coordinator")]
            address = self._daemon(stack, "coordinator", "penstock.appliance", *books, *parent_watch)
            for name in ("worker-1", "worker-2"):
                work = ["--coordinator", address, "--name", name, "--slots", str(slots), "--allow", allow]
                self._daemon(stack, name, "penstock.worker", *work, *parent_watch)
            self.environment["PENSTOCK_COORDINATOR"] = address
            yield

    def _daemon(self, stack: contextlib.ExitStack, name: str, *command: str) -> str:
        """Start a daemon, which ends when `stack` is closed. Return the line that the daemon prints when it is
        ready."""
        read, write = os.pipe()
        self._daemons.append(name)
        process = self._start(name, *command, "--ready-fd", str(write), pass_fds=(write,))
        stack.callback(_stop, process)
        os.close(write)
        with open(read) as ready:
            in_time, _, _ = select.select([ready], [], [], START_S)
            line = ready.readline().strip() if in_time else ""
        if not line:
            raise DemoError(f"the {name} did not start:\n{self._last_words()}")
        return line

    def _start(
        self, name: str, *command: str, pass_fds: tuple[int, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a Python module as a process whose output goes to a file."""
        with open(self.out / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**self.environment, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
            )

    def train(
        self,
        name: str,
        title: str,
        command: list[str],
        *,
        boxes: int,
        workers: int,
        kill_when: Callable[[], bool] | None = None,
        env: dict[str, str],
    ) -> None:
        """Run a training module on all boxes, as torchrun does, to its end or until `kill_when` returns True."""
        print(f"running {title}", flush=True)
        shared = {
            "PENSTOCK_NUM_WORKERS_PER_BOX": str(workers),
            "WORLD_SIZE": str(boxes),
            "LOCAL_WORLD_SIZE": str(boxes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        }
        names = [f"{name}-box{rank}" for rank in range(boxes)]
        processes = [
            self._start(box, *command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, box in enumerate(names)
        ]
        logged, patience = self._logged(), START_S
        before, began = logged, time.monotonic()
        deadline, told = began + patience, began
        killed = False
        try:
            while any(process.poll() is None for process in processes):
                if kill_when is not None and kill_when():
                    killed = True
                    break
                for process, box in zip(processes, names, strict=True):
                    if process.poll():
                        raise DemoError(f"{box} ended with status {process.returncode}:\n{self._last_words(box)}")
                if (found := self._logged()) != logged:
                    logged, patience = found, STALLED_S
                    deadline = time.monotonic() + patience
                if time.monotonic() > told + TELL_S:
                    told = time.monotonic()
                    state = "training" if logged != before else "starting: torch is imported, and the first batch made"
                    print(f"    {told - began:.0f} s: {state}", flush=True)
                if time.monotonic() > deadline:
                    raise DemoError(f"{title} made no step for {patience:g} s:\n{self._last_words(*names)}")
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()  # SIGKILL: the training cannot prepare for it
            statuses = [process.wait() for process in processes]
        expected = -signal.SIGKILL if killed else 0
        if killed != (kill_when is not None) or any(status != expected for status in statuses):
            raise DemoError(f"{title}: the boxes ended with {statuses}, not {expected}:\n{self._last_words(*names)}")

    def _logged(self) -> int:
        """Return the size in bytes of the logs of all boxes together. Each step adds a line to a log."""
        return sum(log.stat().st_size for log in self.out.glob("*/box*.jsonl"))  # below, checkpoints come and go

    def _last_words(self, *names: str) -> str:
        """Return the last lines of output of these processes, and of the daemons."""
        return "\n".join(
            f"--- {name}\n" + "\n".join((self.out / f"{name}.log").read_text(errors="replace").splitlines()[-25:])
            for name in (*names, *self._daemons)
        )


def read_log(path: Path) -> list[Step]:
    """Return the complete lines of a box's log. The last line may be incomplete, because a box may be killed while it
    writes."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def saved(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step, once it is complete. The job was killed meanwhile, but its checkpoint writers
    finish their work."""
    with locked(folder, timeout_s=30):
        found = newest(folder)
    if found is None or found.step != step:
        raise DemoError(f"{folder} must have a complete checkpoint of step {step}, but has none")
    return found.path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
