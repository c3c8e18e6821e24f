"""`penstock demo`: real daemons and a training loop here; kills a worker, saves, resumes with another number of
workers, and compares all batches with a run without faults."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.deploy.console.signals import signals_as_errors
from penstock.deploy.engines import local
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.proto.errors import WorkerLostError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.runtime.process.identity import Identity

__all__ = ["run_demo"]

STEPS, KILL_AT, SAVE_AT = 120, 40, 80
BATCH = 8
SEED = 7
INPUT = "penstock.deploy.demo.demo_input"


class _Demo:
    def __init__(self, fleet: Fleet, show: Any) -> None:
        self._fleet, self._show = fleet, show
        self._token = Path(fleet.token_file).read_text().strip()
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
        with Appliance(
            self._fleet.coordinator,
            job=job,
            seed=SEED,
            box=0,
            num_boxes=1,
            num_workers_per_box=workers,
            token=self._token,
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
        with CoordinatorClient(self._fleet.coordinator, self._token) as client:
            reply = client.status()
        slots = [slot for status in reply.runs if status.run == run for box in status.boxes for slot in box.slots]
        self.killed = slots[0].worker
        record = FleetFolder(Path(self._fleet.folder)).fleet()
        assert record is not None
        for daemon in record.about["daemons"]:
            if daemon["name"] == self.killed and daemon["identity"] is not None:
                Identity(**daemon["identity"]).send(signal.SIGKILL)
                self._show(f"    step {KILL_AT}: worker {self.killed}, which makes the next batches, is killed")
                return
        raise WorkerLostError(f"worker {self.killed} ended before the demo could kill it. Run the demo again")


def run_demo(as_json: bool) -> int:
    """Run the demo and print the result; 0 if the batches with faults equal those without, else 1."""
    began = time.monotonic()

    def show(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    def took(since: float) -> str:
        return f"({time.monotonic() - since:.1f} s)"

    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        del os.environ[name]  # variables of another installation, which the demo must not use
    show("Penstock on this machine: a coordinator, two worker daemons, a training loop. All end with the demo.\n")
    signals = signals_as_errors(lambda number: SystemExit(128 + number))  # so that a signal ends the daemons too
    with signals, _fleet() as fleet, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning about the recovery, which the demo reports itself
        demo = _Demo(fleet, show)
        show(f"1   penstock up: the coordinator listens on {fleet.coordinator}, with two workers {took(began)}")
        since = time.monotonic()
        show(f"2   A training loop streams {STEPS} shuffled batches, which both workers make in turn.")
        show("    The workers import PyTorch first, which takes seconds.")
        whole, _ = demo.stream("undisturbed", 2)
        show(f"    digest of the stream: {whole[STEPS]:016x} {took(since)}")
        since = time.monotonic()
        show("3   The same again, with a fault.")
        disturbed, state = demo.stream("disturbed", 2, until=SAVE_AT)
        show(f"    the loop waited {demo.longest_s:.1f} s at most: the coordinator moved the work to another worker")
        show(f"    step {SAVE_AT}: the loop saves its state and ends {took(since)}")
        since = time.monotonic()
        show("4   Resumed from the state, with three workers instead of two.")
        resumed, _ = demo.stream("resumed", 3, state=state)
        show(f"    digest of the stream: {resumed[STEPS]:016x} {took(since)}\n")
        both = disturbed | resumed
        same = sum(both.get(step) == digest for step, digest in whole.items())
        checks = {
            f"{same} of {STEPS} steps are the same batches": same == len(both) == STEPS,
            "killed and resumed, the whole stream has the same digest": resumed.get(STEPS) == whole[STEPS],
            f"worker {demo.killed} was killed, and the loop recovered": demo.recoveries > 0,
        }
    for what, well in checks.items():
        show(f"{'ok  ' if well else 'BAD '}{what}")
    seconds = time.monotonic() - began
    show(f"{seconds:.0f} s. Next: penstock up --allow yourmodule, penstock doctor yourmodule:input_fn, and the README.")
    ok = all(checks.values())
    if as_json:
        found = {
            "ok": ok,
            "steps": STEPS,
            "same": same,
            "digest": f"{whole[STEPS]:016x}",
            "digest_resumed": f"{resumed[STEPS]:016x}",
            "killed": {"worker": demo.killed, "step": KILL_AT},
            "recoveries": demo.recoveries,
            "longest_wait_s": round(demo.longest_s, 3),
            "saved_at": SAVE_AT,
            "workers": [2, 3],
            "seconds": round(seconds, 1),
        }
        print(json.dumps(found, indent=2))
    return 0 if ok else 1


@contextmanager
def _fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as path:
        folder = FleetFolder(Path(path) / "fleet")
        folder.make()
        settings = {"name": "demo", "workers": 2, "slots": 3, "allow": INPUT, "listen": "127.0.0.1:0"}
        plan = FleetPlan.model_validate({**settings, "token_file": str(folder.token_file(None))})
        local.up(plan, folder, ends_with_us=True)
        try:
            fleet = folder.fleet()
            assert fleet is not None
            yield fleet
        finally:
            local.down(folder, 30)
