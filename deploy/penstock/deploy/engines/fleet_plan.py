"""Plan of a fleet, made from the settings of `penstock up` and checked in the same way as the daemons' own settings."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.deploy.console.daemon_settings import TlsSettings, WorkerSettings, flag, resolve, variable
from penstock.deploy.console.fleet_settings import UpSettings
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.proto.errors import InvalidArgumentError

__all__ = ["plan_of"]

_OF_RAY = ("ray_address", "near", "coordinator_node", "state_dir", "send_token")
"""Names of the settings that only the engine ray has."""


def plan_of(settings: UpSettings, tls: TlsSettings, token_file: Path | None, folder: FleetFolder) -> FleetPlan:
    """Check settings of `penstock up` in the same way as the daemons check theirs, and return the plan. Write a token
    file if there is none."""
    if not settings.allow:
        raise InvalidArgumentError(
            f"{flag('allow')} (or the variable {variable(UpSettings, 'allow')}) must be given: the modules whose "
            "input_fn workers may run. Give a prefix such as mypackage, or '*' for any"
        )
    mine = _OF_RAY if settings.engine == "ray" else ()
    for name in _OF_RAY:
        if name in settings.model_fields_set and name not in mine:
            raise InvalidArgumentError(
                f"{flag(name)} must be given only with --engine ray, got --engine {settings.engine}. Omit it"
            )
    cores = max(1, len(os.sched_getaffinity(0)) // settings.workers)
    slots = settings.slots or (cores if settings.engine == "local" else 8)
    checked = resolve(WorkerSettings, slots=slots, allow=settings.allow, name=settings.name)
    return FleetPlan(
        engine=settings.engine,
        name=settings.name,
        workers=settings.workers,
        slots=slots,
        allow=checked.allow,
        listen=settings.listen,
        token_file=str(folder.token_file(token_file)),
        runner_memory=settings.runner_memory,
        insecure=settings.insecure,
        tls={
            name: value if name == "tls_name" else str(Path(value).expanduser().absolute())
            for name in TlsSettings.model_fields
            if (value := getattr(tls, name))
        },
        options={name: getattr(settings, name) for name in mine},
        timeout_s=settings.timeout,
    )
