"""Actor on a Ray node: the parent of one real daemon, which it keeps running. It ends with the actor, so none is left
behind by a killed actor or raylet; Ray restarts workers elsewhere. Batches and control calls never pass through
Ray."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import CommandError
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.keeper import COORDINATOR_GRACE_S, LONGEST_PAUSE_S, WORKER_GRACE_S, FleetKeeper

__all__ = ["DaemonActor", "node_folder"]


def node_folder(plan: FleetPlan) -> Path:
    return Path(plan.state_dir or f"/var/tmp/penstock-{os.getuid()}") / plan.name


class DaemonActor:
    """Ray actor that keeps one daemon running. `plan`: fields of a FleetPlan; `name`: "" is the coordinator;
    `coordinator`: address, for a worker; `token`: written to a file here; "": the plan's file exists here."""

    def __init__(self, plan: dict[str, Any], name: str, coordinator: str, token: str) -> None:
        import ray

        self._plan = FleetPlan.model_validate(plan)
        self._folder = FleetFolder(node_folder(self._plan))
        self._folder.make()
        self._host: str = ray.util.get_node_ip_address()
        self._error: CommandError | None = None
        self._over = threading.Event()
        """Set when the daemon is first ready, or is given up."""
        if token:
            self._folder.save_token(token)
        self._grace_s = WORKER_GRACE_S if name else COORDINATOR_GRACE_S
        self._keeper = FleetKeeper(
            f"worker {name}" if name else "coordinator",
            lambda line: self._command(name, coordinator),
            self._folder.logs / f"{name or 'coordinator'}.log",
            restart_always=not name,
            changed=self._changed,
        )
        self._is_worker = bool(name)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="penstock-keeper", daemon=True).start()

    def _command(self, name: str, coordinator: str) -> list[str]:
        host = f"[{self._host}]" if ":" in self._host else self._host
        if name:
            return self._plan.worker_command(name, coordinator, f"{host}:0")
        # If port 0 chose a free port, later starts must use the same, because peers have its address.
        port = self._plan.listen.rpartition(":")[2]
        before = self._folder.address if port == "0" else ""
        return self._plan.coordinator_command(str(self._folder.state_dir), before or f"{host}:{port}")

    def _run_loop(self) -> None:
        keeping = self._loop.create_task(self._keep())
        self._loop.run_forever()  # until this process ends: `stop` runs here too
        keeping.cancel()

    async def _keep(self) -> None:
        try:
            await self._keeper.run()
        except CommandError as error:
            self._error = error
            self._over.set()
            # During the first start, `penstock up` reads the error and ends this actor. Later, the node has become
            # unfit for the daemon, so this process ends after a pause, and Ray restarts the actor, perhaps on another
            # node.
            self._loop.call_later(LONGEST_PAUSE_S, os._exit, 1)

    def _changed(self) -> None:
        if self._keeper.state == "ready":
            if not self._is_worker:
                self._folder.address = self._keeper.line
            self._over.set()

    def ready(self) -> dict[str, Any]:
        """Wait until the daemon is ready or given up. Return its status, or its `error`, exit `code` and `host`."""
        self._over.wait()
        if self._error is not None:
            return {"error": str(self._error), "code": self._error.code, "host": self._host}
        return self.about()

    def about(self) -> dict[str, Any]:
        """Return the daemon's present status without waiting."""
        import ray

        return {
            "line": self._keeper.line,
            "state": self._keeper.state,
            "pid": self._keeper.pid,
            "restarts": self._keeper.restarts,
            "host": self._host,
            "node": ray.get_runtime_context().get_node_id(),
            "actor_pid": os.getpid(),
        }

    def stop(self) -> None:
        if self._error is None:
            asyncio.run_coroutine_threadsafe(self._keeper.stop(self._grace_s), self._loop).result()
