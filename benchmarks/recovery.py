"""Waiting time of the training loop after a worker is killed, and while one is drained.

    python -m benchmarks.recovery [--kills 10]

It starts a coordinator and two daemons with enough slots and default settings, and one box with one slot, so that the
loop waits as soon as it has taken all batches in flight. "runner" kills the process that runs the loader; "daemon"
kills the whole daemon, which is started again for the next kill. Both measure the seconds from the kill to the slot's
next batch. "drained" drains the worker, so that the slot migrates, and measures the longest wait of the loop for one
batch meanwhile, of which 20 ms are the batch itself. "late" does the same once the epoch has taken 6 s of work, so that
it is not made again from its beginning. It prints one JSON object: seconds, by lane and by operation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import tree

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.rpc.calls import CoordinatorClient

__all__ = ["slow_batches"]

TARGET_S = {"runner": 2.0, "daemon": 5.0, "drained": 0.3}
WARM = 30
"""Number of batches that the loop takes between two kills."""
LATE = 300
"""Number of batches before the first kill after which an epoch has taken three times `replay_s`."""


class Slow:
    """Loader that yields a batch each 20 ms, so that the ring never holds all batches of the run. It has a state:
    without one, a new runner would replay the epoch from its start, which takes time."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            time.sleep(0.02)
            self.number += 1
            yield self.number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def slow_batches() -> Slow:
    """Return the loader of this benchmark: the input_fn."""
    return Slow()


class Fleet:
    """Coordinator and worker daemons, started by their commands, as an operator starts them."""

    def __init__(self, folder: str, slots: int = 2) -> None:
        self._slots = slots
        self.token = secrets.token_hex(16)
        os.environ |= {"PENSTOCK_TOKEN": self.token, "PENSTOCK_INSECURE": "true"}
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, "PYTHONPATH": path}
        self._coordinator, self.address = self._start("penstock.appliance", "--state-dir", folder)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("one", "two"):
            self.start_daemon(name)

    def start_daemon(self, name: str) -> None:
        arguments = [
            "--coordinator",
            self.address,
            "--slots",
            str(self._slots),
            "--allow",
            "benchmarks",
            "--name",
            name,
            "--insecure",
        ]
        self.daemons[name], _ = self._start("penstock.worker", *arguments)

    def _start(self, module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        read, write = os.pipe()
        command = [sys.executable, "-m", module, *arguments, "--ready-fd", str(write)]
        process = subprocess.Popen(
            command, env=self._environment, pass_fds=[write], stderr=subprocess.DEVNULL, process_group=0
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            return process, pipe.readline().strip()

    def holder(self) -> tuple[str, int]:
        """Return the name of the daemon that has the slot, and the process id of the process that runs its loader: the
        one that makes the present epoch. Raises RuntimeError if no daemon has one."""
        for name, daemon in self.daemons.items():
            for pid in set(tree(daemon.pid)) - {daemon.pid}:
                with contextlib.suppress(OSError):
                    if "penstock-ring" in Path(f"/proc/{pid}/maps").read_text():
                        return name, pid
        raise RuntimeError("one of the worker daemons must have a runner for the slot, got none: see `penstock status`")

    def close(self) -> None:
        for process in [*self.daemons.values(), self._coordinator]:
            process.terminate()
            process.wait(20)


def waits(fleet: Fleet, what: str, lane: Literal["auto", "tcp"], kills: int, first: int = WARM) -> list[float]:
    """Kill a process `kills` times. Return, for each kill, the seconds until the loop gets the first batch that the
    killed process had not made. `what`: the process to kill, "runner" or "daemon". `first`: number of batches before
    the first kill."""
    found: list[float] = []
    os.environ["PENSTOCK_LANE"] = lane
    with Appliance(
        fleet.address,
        job=f"{what}-{lane}-{first}",
        num_workers_per_box=1,
        box=0,
        num_boxes=1,
    ) as appliance:
        executor = DataExecutor(DataLoader(slow_batches), num_steps=10**9, appliance=appliance)
        killed, since, recoveries, name = 0.0, 0, 0, ""
        for _ in executor:
            since += 1
            if killed and executor.stats.recoveries > recoveries:
                found.append(time.monotonic() - killed)
                if what == "daemon":
                    fleet.daemons[name].wait(10)
                    fleet.start_daemon(name)
                if len(found) == kills:
                    break
                killed, since = 0.0, 0
            if not killed and since == (WARM if found else first):
                recoveries = executor.stats.recoveries
                name, runner = fleet.holder()
                os.kill(runner if what == "runner" else fleet.daemons[name].pid, signal.SIGKILL)
                killed = time.monotonic()
    return found


def drained_waits(fleet: Fleet, lane: Literal["auto", "tcp"], drains: int, first: int = WARM) -> list[float]:
    """Drain the slot's worker `drains` times. Return, for each migration of the slot, the longest wait of the loop for
    a batch meanwhile, in seconds. `first`: number of batches before the first drain."""
    found: list[float] = []
    os.environ["PENSTOCK_LANE"] = lane
    with (
        CoordinatorClient(fleet.address, fleet.token, insecure=True) as client,
        Appliance(
            fleet.address,
            job=f"drained-{lane}-{first}",
            num_workers_per_box=1,
            box=0,
            num_boxes=1,
        ) as appliance,
    ):
        executor = DataExecutor(DataLoader(slow_batches), num_steps=10**9, appliance=appliance)
        since, recoveries, name, longest = 0, 0, "", 0.0
        for _ in executor:
            since += 1
            if name:
                longest = max(longest, executor.last_wait_seconds)
                if executor.stats.recoveries > recoveries:
                    found.append(longest)
                    client.drain(name, undo=True)
                    if len(found) == drains:
                        break
                    since, name, longest = 0, "", 0.0
            elif since == (WARM if found else first):
                recoveries = executor.stats.recoveries
                name, _ = fleet.holder()
                client.drain(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds from a kill to the next batch.")
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind, on each lane")
    given = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    figures: dict[str, Any] = {"kills": given.kills, "target_s": TARGET_S, "waits_s": {}}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(folder)
        try:
            for lane in ("auto", "tcp"):
                for case in ("runner", "daemon", "drained", "runner late", "drained late"):
                    what, _, late = case.partition(" ")
                    first = LATE if late else WARM
                    seconds = (
                        drained_waits(fleet, lane, given.kills, first)
                        if what == "drained"
                        else waits(fleet, what, lane, given.kills, first)
                    )
                    figures["waits_s"][f"{case} {lane}"] = {
                        "median": round(statistics.median(seconds), 3),
                        "max": round(max(seconds), 3),
                        "all": [round(each, 3) for each in seconds],
                    }
        finally:
            fleet.close()
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    # By its own name, because workers import the input from there.
    from benchmarks import recovery

    sys.exit(recovery.main())
