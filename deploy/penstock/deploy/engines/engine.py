"""Input of an engine (a plan) and its result (a fleet). A plan is frozen data, made from settings; an engine starts it.

Penstock schedules no machines: the local engine supervises processes here, and the others submit the same daemons to
Ray, Slurm or Kubernetes, which place them, restart them, and replace nodes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Engine", "Fleet", "FleetPlan", "exports", "worker_name"]


@dataclass(frozen=True)
class FleetPlan:
    """Plan of one coordinator and a number of equal workers."""

    engine: str
    name: str
    """Name of the fleet."""
    workers: int
    slots: int
    """Slots of each worker: its largest number of runners at a time."""
    allow: str
    """Module prefixes, separated by commas."""
    listen: str
    """Address of the coordinator, HOST:PORT. Engines of several machines use only the port."""
    token_file: str
    """Path of the token file: on this machine, or the same path on all."""
    runner_memory: str = ""
    insecure: bool = False
    tls: Mapping[str, str] = field(default_factory=dict)
    """Given TLS settings (tls_ca, tls_cert, tls_key, tls_name): files on the daemons' machines."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that only this engine has."""
    timeout_s: float = 120.0
    """Seconds until all daemons must be ready."""

    def differences(self, other: FleetPlan) -> list[str]:
        """Return the flags of the settings in which two plans differ."""

        def flat(plan: FleetPlan) -> dict[str, Any]:
            own = {part.name: getattr(plan, part.name) for part in fields(plan)}
            del own["timeout_s"], own["tls"], own["options"]
            return {**own, **plan.tls, **plan.options}

        mine, theirs = flat(self), flat(other)
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        return [f"--{name.replace('_', '-')}" for name in names]

    def coordinator_command(self, state_dir: str, listen: str) -> list[str]:
        """Return the arguments of `penstock` for the coordinator."""
        return [
            *("coordinator", "--listen", listen, "--state-dir", state_dir, "--token-file", self.token_file),
            *self._tls_flags(),
            *(["--insecure"] if self.insecure else []),
        ]

    def worker_command(self, name: str, coordinator: str, listen: str) -> list[str]:
        """Return the arguments of `penstock` for a worker."""
        return [
            *("worker", "--name", name, "--coordinator", coordinator, "--listen", listen),
            *("--slots", str(self.slots), "--allow", self.allow, "--token-file", self.token_file),
            *(["--runner-memory", self.runner_memory] if self.runner_memory else []),
            *self._tls_flags(),
            *(["--insecure"] if self.insecure else []),
        ]

    def _tls_flags(self) -> list[str]:
        names = ("tls_ca", "tls_cert", "tls_key", "tls_name")
        given = [(name, self.tls[name]) for name in names if self.tls.get(name)]
        return [part for name, file in given for part in (f"--{name.replace('_', '-')}", file)]


def worker_name(fleet: str, number: int) -> str:
    """Return a worker's unique and stable name: a lost daemon is replaced under its name, so that the coordinator
    detects the loss at once."""
    return f"{fleet}-{number}"


@dataclass(frozen=True)
class Fleet:
    """A running fleet."""

    engine: str
    name: str
    folder: str
    """Folder of its record, on the machine where it was started."""
    coordinator: str
    """Address for training jobs; "" while it is not known."""
    token_file: str
    tls: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """Data by which the engine finds the fleet again, such as a job id."""

    def environment(self) -> dict[str, str]:
        """Return the variables that a training job needs."""
        shared = {"PENSTOCK_COORDINATOR": self.coordinator, "PENSTOCK_TOKEN_FILE": self.token_file}
        files = {f"PENSTOCK_{name.upper()}": self.tls.get(name, "") for name in ("tls_ca", "tls_name")}
        return {name: value for name, value in {**shared, **files}.items() if value}

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of --json."""
        return {
            "engine": self.engine,
            "name": self.name,
            "dir": self.folder,
            "coordinator": self.coordinator or None,
            "token_file": self.token_file,
            "environment": self.environment(),
            **self.about,
        }


def exports(fleet: Fleet) -> str:
    """Return lines for a shell: `eval "$(penstock up --detach)"`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in fleet.environment().items())


class Engine(Protocol):
    """Interface to start a fleet elsewhere, and to end it."""

    def up(self, plan: FleetPlan, folder: Path) -> Fleet:
        """Start the plan's daemons; return when they are ready, or once the scheduler has accepted them."""

    def down(self, fleet: Fleet, timeout_s: float) -> list[str]:
        """End the fleet. Return a line for each thing that was ended."""
