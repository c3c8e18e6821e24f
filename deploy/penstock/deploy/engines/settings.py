"""What `penstock up` was given: flags over PENSTOCK_UP_* over defaults; and the plan that it makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from penstock.deploy.engines.base import Plan
from penstock.deploy.engines.folder import Folder
from penstock.deploy.settings import (
    DEFAULT_COORDINATOR,
    Section,
    TlsSettings,
    WorkerSettings,
    flag,
    lane_address,
    memory_size,
    resolve,
    variable,
)
from penstock.proto.errors import InvalidArgumentError

__all__ = ["ENGINES", "UpSettings", "plan_of"]

ENGINES = ("local", "ray", "slurm", "kubernetes")
_OWN = {
    "ray": ("ray_address", "near", "coordinator_node", "state_dir", "send_token"),
    "slurm": ("state_dir", "sbatch"),
    "kubernetes": ("namespace", "image", "storage", "tls_secret"),
}
"""Engine -> the settings that it alone knows."""


class UpSettings(Section):
    """Of `penstock up`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_UP_")
    daemon: ClassVar[bool] = True

    engine: str = Field("local", pattern="^(local|ray|slurm|kubernetes)$", description=f"One of {', '.join(ENGINES)}.")
    name: str = Field(
        "penstock",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$",
        description="Of the fleet: small letters, digits and dashes. Workers are called NAME-1, NAME-2.",
    )
    dir: str = Field(
        "",
        description="Folder of the fleet's record, token and logs (default: XDG_STATE_HOME/penstock/NAME). Slurm: on a "
        "file system that all nodes share.",
    )
    workers: int = Field(2, ge=1, le=10_000, description="Worker daemons.")
    slots: int = Field(
        0,
        ge=0,
        le=4096,
        description="Runners that each may run at a time (default: local: the cores, shared out; else 8).",
    )
    allow: str = Field(
        "", description="Prefix of modules whose input_fn may run: mypackage, mypackage.data; repeatable. '*': any."
    )
    listen: Annotated[str, AfterValidator(lane_address)] = Field(
        DEFAULT_COORDINATOR,
        description="Address of the coordinator, HOST:PORT; port 0 takes a free one. Ray, Slurm: the port counts, on "
        "its node's address.",
    )
    runner_memory: Annotated[str, AfterValidator(memory_size)] = Field(
        "", description="Memory that a runner may hold, as 4GiB: see `penstock worker`."
    )
    insecure: bool = Field(False, description="Listen beyond one machine without TLS.")
    timeout: float = Field(120.0, ge=1, le=86_400, description="Seconds until all is ready, or it is an error.")
    ray_address: str = Field("auto", description="Ray: the cluster, as `ray.init` takes it: auto, HOST:PORT, ray://...")
    near: str = Field(
        "",
        description="Ray: put workers on nodes with this resource (accelerator_type:H100) or label (KEY=VALUE), where "
        "the boxes are.",
    )
    coordinator_node: str = Field(
        "", description="Ray: id or address of the coordinator's node (default: the head node)."
    )
    send_token: bool = Field(
        False, description="Ray: hand the token to the nodes through Ray, which stores it in clear text."
    )
    state_dir: str = Field(
        "", description="Ray, Slurm: the coordinator's journal, on a disk of its node (default: below /var/tmp)."
    )
    sbatch: str = Field(
        "", description="Slurm: further arguments of sbatch, as one text: '--partition cpu --time 1-0'."
    )
    namespace: str = Field("default", description="Kubernetes: where to put it.")
    image: str = Field("", description="Kubernetes: the image with Penstock and your code.")
    storage: str = Field("1Gi", description="Kubernetes: size of the coordinator's volume.")
    tls_secret: str = Field("", description="Kubernetes: Secret with tls.crt, tls.key and ca.crt, for all daemons.")


def plan_of(
    settings: UpSettings, tls: TlsSettings, token_file: Path | None, folder: Folder, *, make_token: bool
) -> Plan:
    """The plan of what was asked for, checked as the daemons will check it."""
    if not settings.allow:
        raise InvalidArgumentError(
            f"{flag('allow')} is missing (or the variable {variable(UpSettings, 'allow')}): module prefixes of your "
            "input_fn, such as mypackage; '*' for any"
        )
    mine = _OWN.get(settings.engine, ())
    for engine, names in _OWN.items():
        for name in names:
            if name in settings.model_fields_set and name not in mine and engine != settings.engine:
                raise InvalidArgumentError(f"{flag(name)} means nothing to the engine {settings.engine}")
    cores = max(1, len(os.sched_getaffinity(0)) // settings.workers)
    slots = settings.slots or (cores if settings.engine == "local" else 8)
    checked = resolve(WorkerSettings, slots=slots, allow=settings.allow, name=settings.name)
    return Plan(
        engine=settings.engine,
        name=settings.name,
        workers=settings.workers,
        slots=slots,
        allow=checked.allow,
        listen=settings.listen,
        token_file=str(folder.token_file(token_file, make=make_token)),
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
