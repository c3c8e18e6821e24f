"""Actor on a Ray node: the parent of one real daemon. Each ends with the other, so none is left behind by a killed
actor or raylet, and Ray starts both again, workers perhaps elsewhere. Batches and control calls never pass through
Ray."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import BUG
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder, open_log
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, WORKER_GRACE_S, log_end
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import module, spawn

FAILED_START_S = 30.0
"""Seconds from a failed start to the next: first `penstock up` reads why, and ends the actor. Later the node has become
unfit for the daemon, and Ray may choose another."""


def node_folder(plan: FleetPlan) -> Path:
    return Path(plan.state_dir or f"/var/tmp/penstock-{os.getuid()}") / plan.name


class DaemonActor:
    """Ray actor with one daemon. `plan`: fields of a FleetPlan; `name`: "" is the coordinator; `coordinator`: address,
    for a worker; `token`: written to a file here; "": the plan's file exists here."""

    def __init__(self, fields: dict[str, Any], name: str, coordinator: str, token: str) -> None:
        import ray

        plan = FleetPlan.model_validate(fields)
        folder = FleetFolder(node_folder(plan))
        folder.make()
        if token:
            folder.save_token(token)
        address = ray.util.get_node_ip_address()
        host = f"[{address}]" if ":" in address else address
        if name:
            command = plan.worker_command(name, coordinator, f"{host}:0")
        else:
            command = plan.coordinator_command(str(folder.state_dir), f"{host}:{plan.listen.rpartition(':')[2]}")
        self._is_worker = bool(name)
        self._log = folder.logs / f"{name or 'coordinator'}.log"
        self._output = LinePipe()
        self._daemon = spawn(
            module("penstock.deploy", *command, "--parent-pid", str(os.getpid())),
            stdout=self._output.theirs,
            stderr=open_log(self._log),
            linked=True,
        )
        self._stopping = False
        self._about = {"host": address, "node": ray.get_runtime_context().get_node_id(), "actor_pid": os.getpid()}
        self._started: Future[dict[str, Any]] = Future()
        threading.Thread(target=self._watch, name="penstock-watch", daemon=True).start()

    def _watch(self) -> None:
        """End this process when the daemon ends, so that Ray starts the actor again; but not after a worker's orderly
        end, which an operator wanted."""
        line = self._output.line(math.inf)
        if line is not None:
            self._started.set_result({**self._about, "line": line.decode(), "pid": self._daemon.pid})
        code = self._daemon.result()
        if line is None:
            why = {"error": log_end(self._log), "code": code if code > 1 else BUG}
            self._started.set_result({**self._about, **why})
            time.sleep(FAILED_START_S)
        if not self._stopping and not (code == 0 and self._is_worker):
            os._exit(1)

    def ready(self) -> dict[str, Any]:
        """Wait until the daemon is ready or has failed. Return what is known of it, or its `error`, exit `code` and
        `host`."""
        return self._started.result()

    def has_left(self) -> bool:
        """Return True if the daemon ended in order, which an operator wanted."""
        return not self._stopping and self._daemon.status == 0

    def stop(self) -> None:
        self._stopping = True
        self._daemon.end(WORKER_GRACE_S if self._is_worker else COORDINATOR_GRACE_S)
