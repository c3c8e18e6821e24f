"""Coordinator and worker daemons as processes of their own, as an operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from held_port import HeldPort

SUPPORT = str(Path(__file__).parent)
INPUTS = str(Path(__file__).parent.parent / "inputs")
TOKEN = "a-token-for-tests-only-0123456789"


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
        path = os.pathsep.join([INPUTS, SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "PYTHONPATH": path, "PENSTOCK_TOKEN": TOKEN, **environment}
        self.workers: list[subprocess.Popen[bytes]] = []
        self._port = HeldPort()
        self.address = f"127.0.0.1:{self._port.number}"
        self.coordinator = self._start_coordinator()

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        return self._start(self._module, *arguments, *self._options)[0]

    def restart_coordinator(self) -> None:
        """Start it again, on the same address and state."""
        self.coordinator.wait(10)
        self.coordinator = self._start_coordinator()

    def add_worker(
        self,
        slots: int,
        *more: str,
        allow: str = "streams",
        name: str = "",
        through: str = "",
        before: Sequence[str] = (),
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a worker; returns when it is registered. `more`: further arguments; `through`: the coordinator's
        address, if it is another one; `before`: a command that starts it, and becomes it."""
        arguments = ["--coordinator", through or self.address, "--slots", str(slots), "--allow", allow, *more]
        arguments += ["--name", name] if name else []
        worker, _ = self._start("penstock.worker", *arguments, before=before, stderr=stderr)
        self.workers.append(worker)
        return worker

    @contextmanager
    def joined(
        self, slots: int, *more: str, allow: str = "streams", name: str = ""
    ) -> Iterator[subprocess.Popen[bytes]]:
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
    ) -> tuple[subprocess.Popen[bytes], str]:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", module, *arguments, "--ready-fd", str(write)],
                env=self.environment,
                pass_fds=[write],
                stderr=stderr,
                process_group=0,  # as a service manager starts them; and a test may kill one with its group
            )
        finally:
            os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.readline().strip()
        if not said:
            raise RuntimeError(f"{module} did not start: exit status {process.wait(10)}")
        return process, said

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
