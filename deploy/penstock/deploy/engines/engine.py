"""Input of an engine (a plan) and its result (a fleet: a coordinator and its workers). Penstock does not schedule
machines: the local engine supervises processes here, the other submits the same daemons to Ray."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from penstock.deploy.console.settings import UpSettings, flag
from penstock.proto.rpc.addresses import socket_path
from penstock.runtime.config.job_settings import TlsFiles
from penstock.runtime.process.identity import Identity


class FleetPlan(UpSettings):
    """Settings of `penstock up`, complete and checked (`model_validate`)."""

    token_file: str
    """Path of the token file here, and on all nodes of Ray unless it sends the token."""

    @property
    def tls_files(self) -> dict[str, str]:
        """TLS settings, by name; paths on the daemons' machines. The `*` in credentials stands for the role."""
        return {name: value for name in TlsFiles.FILES if (value := getattr(self, name))}

    @property
    def for_callers(self) -> dict[str, str]:
        """Settings by which a caller on this machine may send its token to the fleet's coordinator."""
        names = ("tls_ca", "tls_name", "credentials")
        files = {name: value for name, value in self.tls_files.items() if name in names}
        return {**files, **({"insecure": "true"} if self.insecure else {})}

    def coordinator_command(self, state_dir: str, listen: str) -> list[str]:
        return [
            *("coordinator", "--listen", listen, "--state-dir", state_dir),
            *self._shared_flags(),
        ]

    def worker_command(self, name: str, coordinator: str, listen: str) -> list[str]:
        return [
            *("worker", "--name", name, "--coordinator", coordinator, "--listen", listen),
            *("--slots", str(self.slots), "--allow", self.allow),
            *self._shared_flags(),
        ]

    def _shared_flags(self) -> list[str]:
        tls = [part for name, file in self.tls_files.items() for part in (flag(name), file)]
        token = [] if self.credentials else ["--token-file", self.token_file]
        return [*token, *tls, *(["--insecure"] if self.insecure else [])]


class Daemon(BaseModel):
    """Daemon of a fleet. A process on another machine has no identity here, but an actor that is its parent."""

    name: str
    state: str = "ready"
    restarts: int = 0
    identity: Identity | None = None
    """None between two lives, too."""
    pid: int = 0
    host: str = ""
    node: str = ""
    actor_pid: int = 0


class Fleet(BaseModel):
    """Record of a running fleet: how training jobs and `penstock down` find it."""

    engine: Literal["local", "ray"]
    name: str
    dir: str
    """Folder of this record, on the machine where the fleet was started."""
    coordinator: str
    """Address for training jobs; "" if it is not known yet."""
    token_file: str
    tls: dict[str, str] = {}
    """`FleetPlan.for_callers`."""
    daemons: list[Daemon] = []
    supervisor: Identity | None = None
    """Process whose end ends a local fleet."""
    plan: dict[str, Any] = {}
    """Fields of the FleetPlan, with the number of workers of now."""
    scaled: str = ""
    """Id of the last Scaling that the supervisor has begun."""
    ray_address: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables with which a training job finds the fleet."""
        token = "" if "credentials" in self.tls else self.token_file
        tls = self.tls if socket_path(self.coordinator) is None else {}
        shared = {"coordinator": self.coordinator, "token_file": token, **tls}
        return {f"PENSTOCK_{name.upper()}": value for name, value in shared.items() if value}

    def for_other_machines(self) -> str:
        """Return what to do on other machines, as text; "" if `penstock up` made no credentials for them."""
        files = self.tls.get("credentials", "")
        if "*" not in files:
            return ""
        at, variable = f"--coordinator {self.coordinator}", f"PENSTOCK_COORDINATOR={self.coordinator}"
        worker = f"--listen ADDRESS:0 --slots N --allow {shlex.quote(self.plan['allow'])}"
        return (
            f"For other machines, copy one of {files} there, with mode 0600:\n"
            f"  worker:        penstock worker --credentials worker.pem {at} {worker}\n"
            f"  training job:  PENSTOCK_CREDENTIALS=client.pem {variable} python train.py\n"
            f"  operator:      penstock status --credentials admin.pem {at}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**self.model_dump(exclude={"plan", "scaled"}), "environment": self.environment()}


class Scaling(BaseModel):
    """New size of a running fleet: so many workers that can work. Those that drain or have left do not count, and go
    first."""

    workers: int
    drained: list[str] = []
    """Workers that drain, which end."""
    request: str = ""
    """Id by which the fleet's record says that it has this size."""

    def split(self, able: Sequence[str]) -> tuple[list[str], int]:
        """Return which of the workers that run are to end, and how many new ones to start. Of those that can work the
        youngest go, with the highest numbers."""
        working = sorted((name for name in able if name not in self.drained), key=_number)
        surplus = working[self.workers :]
        return [*(name for name in able if name in self.drained), *surplus], max(0, self.workers - len(working))


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def new_names(fleet: str, count: int, used: Collection[str]) -> list[str]:
    """Return names for more workers of a fleet, with the lowest numbers that are free. A lost daemon is replaced under
    its name, so that the coordinator detects the loss at once."""
    names = (f"{fleet}-{number}" for number in itertools.count(1))
    return list(itertools.islice((name for name in names if name not in used), count))


def exports(fleet: Fleet) -> str:
    """Return shell commands that set these variables: `eval "$(penstock up --detach)"`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in fleet.environment().items())
