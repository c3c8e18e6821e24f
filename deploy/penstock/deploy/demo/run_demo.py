"""`penstock demo`: real daemons and a training loop here; kills a worker, saves, resumes with another number of
workers, and compares all batches with a run without faults."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.deploy.engines import local
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.proto.errors import WorkerLostError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.credentials.tokens import read_token

STEPS, KILL_AT, SAVE_AT = 120, 40, 80
BATCH = 8
SEED = 7
INPUT = "penstock.deploy.demo.demo_input"


class _Demo:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.killed = ""
        self.recoveries = 0
        self.longest_s = 0.0
        """Longest wait in seconds for one batch after the worker was killed."""

    def stream(self, job: str, workers: int, *, state: dict[str, Any] | None = None, until: int = STEPS) -> Any:
        """Run a loop up to step `until`, from `state` if given. Return the digest after each step, and the state (None
        unless `until` is SAVE_AT)."""
        from penstock.client import Appliance, DataExecutor, DataLoader
        from penstock.deploy.demo.demo_input import images

        digests: dict[int, int | None] = {}
        os.environ["PENSTOCK_TOKEN"] = read_token("client", file=self._fleet.token_file)
        os.environ.pop("PENSTOCK_CREDENTIALS", None)
        with Appliance(
            self._fleet.coordinator,
            job=job,
            seed=SEED,
            box=0,
            num_boxes=1,
            num_workers_per_box=workers,
            timeout_s=60,
        ) as appliance:
            loader = DataLoader(images, STEPS * BATCH, BATCH)
            if state is not None:
                loader.load_state_dict(state)
            first = SAVE_AT if state is not None else 0
            executor = DataExecutor(loader, num_steps=until - first, appliance=appliance)
            asked = time.monotonic()
            for _ in executor:  # a training step goes here
                if self.killed:
                    self.longest_s = max(self.longest_s, time.monotonic() - asked)
                digests[executor.step] = executor.digest
                if job == "disturbed" and executor.step == KILL_AT:
                    self._kill(f"{job}/0")
                asked = time.monotonic()
            self.recoveries += executor.stats.recoveries
            return digests, loader.state_dict() if until == SAVE_AT else None

    def _kill(self, run: str) -> None:
        """Kill a worker daemon that makes batches of the run; its child processes notice that and end."""
        token = read_token("admin", file=self._fleet.token_file)
        with CoordinatorClient(self._fleet.coordinator, token) as client:
            reply = client.status()
        slots = [slot for status in reply.runs if status.run == run for box in status.boxes for slot in box.slots]
        self.killed = slots[0].worker
        record = FleetFolder(Path(self._fleet.dir)).fleet()
        assert record is not None
        for daemon in record.daemons:
            if daemon.name == self.killed and daemon.identity is not None:
                daemon.identity.send(signal.SIGKILL)
                _show(f"    step {KILL_AT}: worker {self.killed}, which makes the next batches, is killed")
                return
        raise WorkerLostError(f"worker {self.killed} ended before the demo could kill it. Run the demo again")


def run_demo() -> int:
    """Run the demo and print the result; 0 if the batches with faults equal those without, else 1."""
    began = time.monotonic()

    def took(since: float) -> str:
        return f"({time.monotonic() - since:.1f} s)"

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends the daemons too
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        del os.environ[name]  # variables of another installation, which the demo must not use
    _show("Penstock on this machine: a coordinator, two worker daemons, a training loop. All end with the demo.\n")
    with _fleet() as fleet, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning about the recovery, which the demo reports itself
        demo = _Demo(fleet)
        _show(f"1   penstock up: the coordinator listens on {fleet.coordinator}, with two workers {took(began)}")
        since = time.monotonic()
        _show(f"2   A training loop streams {STEPS} shuffled batches, which both workers make in turn.")
        _show("    The workers import PyTorch first, which takes seconds.")
        whole, _ = demo.stream("undisturbed", 2)
        _show(f"    digest of the stream: {whole[STEPS]:016x} {took(since)}")
        since = time.monotonic()
        _show("3   The same again, with a fault.")
        disturbed, state = demo.stream("disturbed", 2, until=SAVE_AT)
        _show(f"    the loop waited {demo.longest_s:.1f} s at most: the coordinator moved the work to another worker")
        _show(f"    step {SAVE_AT}: the loop saves its state and ends {took(since)}")
        since = time.monotonic()
        _show("4   Resumed from the state, with three workers instead of two.")
        resumed, _ = demo.stream("resumed", 3, state=state)
        _show(f"    digest of the stream: {resumed[STEPS]:016x} {took(since)}\n")
    both = disturbed | resumed
    same = sum(both.get(step) == digest for step, digest in whole.items())
    checks = {
        f"{same} of {STEPS} steps are the same batches": same == len(both) == STEPS,
        "killed and resumed, the whole stream has the same digest": resumed.get(STEPS) == whole[STEPS],
        f"worker {demo.killed} was killed, and the loop recovered": demo.recoveries > 0,
    }
    for what, well in checks.items():
        _show(f"{'ok  ' if well else 'BAD '}{what}")
    next_steps = "penstock up --allow yourmodule, penstock doctor yourmodule:input_fn, and the README"
    _show(f"{time.monotonic() - began:.0f} s. Next: {next_steps}.")
    return 0 if all(checks.values()) else 1


def _show(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as path:
        folder = FleetFolder(Path(path) / "fleet")
        folder.make()
        settings = {"name": "demo", "workers": 2, "slots": 3, "allow": INPUT}
        plan = FleetPlan.model_validate({**settings, "token_file": str(folder.token_file(None))})
        local.up(plan, folder, ends_with_us=True)
        try:
            fleet = folder.fleet()
            assert fleet is not None
            yield fleet
        finally:
            local.down(folder, 30)
