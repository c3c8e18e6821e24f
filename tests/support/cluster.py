"""Coordinator and worker daemons as processes of their own, forked from an interpreter that has imported them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from held_port import HeldPort
from interpreters import Forked, start

if TYPE_CHECKING:  # it imports torch, which not all who start a cluster need
    from penstock.client import Appliance

SUPPORT = str(Path(__file__).parent)
INPUTS = str(Path(__file__).parent.parent / "inputs")
MODEL = str(Path(__file__).parent.parent / "model")
TOKEN = "a-token-for-tests-only-0123456789"
DAEMONS = ("penstock.appliance.__main__", "penstock.worker.__main__")
READ_AT_START = ("PYTHONPATH", "LD_PRELOAD")
"""Variables by which a process needs an interpreter of its own."""
Daemon = Forked | subprocess.Popen[bytes]


def start_daemon(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    before: Sequence[str] = (),
    own: bool = False,
    stderr: int | None = None,
) -> tuple[Daemon, str]:
    """Start a daemon, and return it with the line that it says when it is ready.

    before: a command that starts it, and becomes it. own: with an interpreter of its own, whose command line and
    environment are the daemon's.
    """
    if "--coordinator" in arguments:
        arguments = [*arguments, "--insecure"]  # on loopback, with a token of tests
    read, write = os.pipe()
    process: Daemon
    try:
        if before or own:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", module, *arguments, "--ready-fd", str(write)],
                env=environment,
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                process_group=0,  # as a service manager starts them; and a test may kill one with its group
            )
        else:
            main = f"{module}.__main__" if module.startswith("penstock.") else module
            process = start(main, arguments, environment, imports=DAEMONS, torch=False, ready=write, stderr=stderr)
    finally:
        os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.readline().strip()
    if not said:
        raise RuntimeError(f"{module} did not start: exit status {process.wait(10)}")
    return process, said


class Cluster:
    """A coordinator on a free port and any number of workers, with the users' modules on their path."""

    def __init__(
        self, state_dir: Path, module: str = "penstock.appliance", options: Sequence[str] = (), **environment: str
    ) -> None:
        """`module`: what is run as the coordinator, with these further options; `environment`: that it and the workers
        get besides ours."""
        self.state_dir = state_dir
        self._module = module
        self._options = options
        path = os.pathsep.join([INPUTS, SUPPORT, MODEL, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._usual = {**os.environ, "PYTHONPATH": path, "PENSTOCK_TOKEN": TOKEN}
        self.environment = {**self._usual, **environment}
        self.workers: list[Daemon] = []
        self._port = HeldPort()
        self.address = f"127.0.0.1:{self._port.number}"
        self.coordinator = self._start_coordinator()

    def _start_coordinator(self) -> Daemon:
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        return self._start(self._module, *arguments, *self._options)[0]

    def restart_coordinator(self, *options: str) -> None:
        """Start it again, on the same address and state, with these further options from now on."""
        self._options = [*self._options, *options]
        self.coordinator.wait(10)
        self.coordinator = self._start_coordinator()

    def box(self, job: str, **settings: Any) -> Appliance:
        """The one box of a job, with two workers. All jobs have one seed, so their runners are forked from one
        interpreter."""
        from appliances import made

        usual = {"num_workers_per_box": 2, "seed": 5, "token": TOKEN, "timeout_s": 60, "box": 0, "num_boxes": 1}
        return made(self.address, job=job, **{**usual, **settings})

    def add_worker(
        self,
        slots: int,
        *more: str,
        allow: str = "streams",
        name: str = "",
        through: str = "",
        before: Sequence[str] = (),
        stderr: int | None = None,
        module: str = "penstock.worker",
    ) -> Daemon:
        """Start a worker; returns when it is registered. `more`: further arguments; `through`: the coordinator's
        address, if it is another one; `before`: a command that starts it, and becomes it; `module`: what is run."""
        arguments = ["--coordinator", through or self.address, "--slots", str(slots), "--allow", allow, *more]
        arguments += ["--name", name] if name else []
        worker, _ = self._start(module, *arguments, before=before, stderr=stderr)
        self.workers.append(worker)
        return worker

    @contextmanager
    def joined(self, slots: int, *more: str, allow: str = "streams", name: str = "") -> Iterator[Daemon]:
        """A worker that leaves with the end of the block."""
        worker = self.add_worker(slots, *more, allow=allow, name=name)
        try:
            yield worker
        finally:
            worker.terminate()
            worker.wait(30)
            self.workers.remove(worker)

    def _start(
        self, module: str, *arguments: str, before: Sequence[str] = (), stderr: int | None = None
    ) -> tuple[Daemon, str]:
        own = any(self.environment.get(name) != self._usual.get(name) for name in READ_AT_START)
        return start_daemon(module, arguments, self.environment, before=before, own=own, stderr=stderr)

    def stop(self) -> None:
        """Stop everything, gently and then not."""
        processes = [*self.workers, self.coordinator]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._port.close()


@contextmanager
def running(
    state_dir: Path, module: str = "penstock.appliance", options: Sequence[str] = (), **environment: str
) -> Iterator[Cluster]:
    """A cluster for as long as the block."""
    cluster = Cluster(state_dir, module, options, **environment)
    try:
        yield cluster
    finally:
        cluster.stop()
