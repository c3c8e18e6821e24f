"""Input of an engine (a plan) and its result (a fleet: a coordinator and its workers). Penstock does not schedule
machines: the local engine supervises processes here, the other submits the same daemons to Ray."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.deploy.console.settings import UpSettings, flag
from penstock.runtime.config.job_settings import TlsFiles

__all__ = ["Fleet", "FleetPlan", "exports", "worker_name"]


class FleetPlan(UpSettings):
    """Settings of `penstock up`, complete and checked (`model_validate`)."""

    token_file: str
    """Path of the token file here, and on all nodes of Ray unless it sends the token."""

    @property
    def tls_files(self) -> dict[str, str]:
        """TLS settings that were given, by name; paths on the daemons' machines."""
        return {name: value for name in TlsFiles.model_fields if (value := getattr(self, name))}

    def differences(self, other: FleetPlan) -> list[str]:
        """Return the flags in which the two plans differ, without --dir and --timeout."""
        mine, theirs = (plan.model_dump(exclude={"dir", "timeout"}) for plan in (self, other))
        return [flag(name) for name in mine if mine[name] != theirs[name]]

    def coordinator_command(self, state_dir: str, listen: str) -> list[str]:
        return [
            *("coordinator", "--listen", listen, "--state-dir", state_dir, "--token-file", self.token_file),
            *self._shared_flags(),
        ]

    def worker_command(self, name: str, coordinator: str, listen: str) -> list[str]:
        return [
            *("worker", "--name", name, "--coordinator", coordinator, "--listen", listen),
            *("--slots", str(self.slots), "--allow", self.allow, "--token-file", self.token_file),
            *(["--runner-memory", self.runner_memory] if self.runner_memory else []),
            *self._shared_flags(),
        ]

    def _shared_flags(self) -> list[str]:
        tls = [part for name, file in self.tls_files.items() for part in (flag(name), file)]
        return [*tls, *(["--insecure"] if self.insecure else [])]


def worker_name(fleet: str, number: int) -> str:
    """Return a worker's name. A lost daemon is replaced under it, so that the coordinator detects the loss at once."""
    return f"{fleet}-{number}"


@dataclass(frozen=True)
class Fleet:
    """Record of a running fleet: how training jobs and `penstock down` find it."""

    engine: str
    name: str
    folder: str
    """Folder of this record, on the machine where the fleet was started."""
    coordinator: str
    """Address for training jobs; "" if it is not known yet."""
    token_file: str
    tls: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """Data by which the engine finds the fleet again, such as a job id."""

    def environment(self) -> dict[str, str]:
        """Return the variables with which a training job finds the fleet."""
        shared = {"PENSTOCK_COORDINATOR": self.coordinator, "PENSTOCK_TOKEN_FILE": self.token_file}
        files = {f"PENSTOCK_{name.upper()}": self.tls.get(name, "") for name in ("tls_ca", "tls_name")}
        return {name: value for name, value in {**shared, **files}.items() if value}

    def as_dict(self) -> dict[str, Any]:
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
    """Return shell commands that set these variables: `eval "$(penstock up --detach)"`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in fleet.environment().items())
