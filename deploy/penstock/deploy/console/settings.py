"""Settings of the commands. Flags precede PENSTOCK_* variables, those the settings file, and the file defaults
(penstock.runtime.config.settings).

A daemon's variables carry its name (PENSTOCK_WORKER_SLOTS), so that one environment can hold those of both. Shared ones
(PENSTOCK_COORDINATOR, PENSTOCK_TLS_*) are in the section [cluster]. None is secret: for the token see command_token.py.
An unknown setting is an error in every source: a setting that is silently ignored is worse than a daemon that does not
start.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_settings import SettingsConfigDict

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.addresses import socket_path
from penstock.runtime.config.job_settings import JobSettings, TlsFiles, check_file
from penstock.runtime.config.settings import (
    IN_MEMORY,
    FilePath,
    IsList,
    IsPath,
    Section,
    Unit,
    field_of,
    reason_of,
    stated,
    variable,
)
from penstock.runtime.config.settings_file import CLUSTER, likely
from penstock.runtime.config.sizes import bytes_of

DEFAULT_SOCKET = "unix:XDG_STATE_HOME/penstock/socket"
DEFAULT_HTTP = "127.0.0.1:7071"
_MODULE = re.compile(r"\*|[^\W\d]\w*(\.[^\W\d]\w*)*")


def _listen_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    is_plain = host.isprintable() and not set(" /") & set(host)
    is_bracketed = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not (host and is_plain and is_bracketed and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError('an address must be "HOST:PORT", with a port from 0 to 65535, or "[::1]:PORT" for IPv6')
    return value


def state_home() -> Path:
    """Return the folder of this user's fleets, and of the socket at which a coordinator listens by default."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "penstock"


def _coordinator_address(value: str) -> str:
    if not value:
        return f"unix:{state_home()}/socket"
    if (path := socket_path(value)) is not None and path.is_absolute():
        return value
    return _listen_address(value)


def _page_address(value: str) -> str:
    return "" if value.lower() in ("", "off") else _listen_address(value)


def _peer_address(value: str) -> str:
    if value.endswith(":0"):
        raise ValueError(
            'an address to connect to must be "HOST:PORT" with the port that the coordinator printed, not 0'
        )
    return _coordinator_address(value)


def _lane_address(value: str) -> str:
    host = _listen_address(value).rpartition(":")[0].strip("[]")
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if unspecified:
        raise ValueError(
            f"must be an address that other machines can connect to, got {host}. Set the address of this machine"
        )
    return value


def _fleet_address(value: str) -> str:
    return value if not value or socket_path(value) is not None else _lane_address(value)


def _memory_size(value: str) -> str:
    if value and bytes_of(value) < 1 << 20:
        raise ValueError("the memory of a runner must be at least 1 MiB. Give a larger size, such as 4GiB")
    return value


def _store_size(value: str) -> str:
    bytes_of(value)
    return value


def slot_budgets(value: str) -> dict[str, int]:
    """Return the most slots by name, or for "client", from "NAME=N,NAME=N"."""
    budgets: dict[str, int] = {}
    for entry in filter(None, map(str.strip, value.split(","))):
        name, _, count = entry.partition("=")
        if not name or not (count.isascii() and count.isdigit()) or name in budgets:
            raise ValueError(
                f"a budget must be client=N, or NAME=N with the name of a token, each only once, got {entry!r}"
            )
        budgets[name] = int(count)
    return budgets


def _slot_budgets(value: str) -> str:
    slot_budgets(value)
    return value


def _fleet_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", value):
        raise ValueError(
            "a fleet's name must have 1 to 42 lowercase letters (a to z), digits and dashes, without a dash at its "
            "beginning or end"
        )
    return value


Seconds = Annotated[float, Unit("SECONDS"), Field(allow_inf_nan=False)]
Count = Annotated[int, Unit("N")]
Listen = Annotated[str, AfterValidator(_coordinator_address), Unit("HOST:PORT")]
FleetListen = Annotated[str, AfterValidator(_fleet_address), Unit("HOST:PORT")]
LaneListen = Annotated[str, AfterValidator(_lane_address), Unit("HOST:PORT")]
PageListen = Annotated[str, AfterValidator(_page_address), Unit("HOST:PORT")]
MemorySize = Annotated[str, AfterValidator(_memory_size), Unit("SIZE")]
Modules = Annotated[str, IsList(), Unit("PREFIX")]


class _Logging(Section):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")
    table: ClassVar[str] = CLUSTER

    log_format: Literal["text", "json"] = Field(
        "text",
        description="Format of the log: text, or json: one object a line.",
    )


class PeerSettings(TlsFiles):
    """Settings of workers and of the commands that call the coordinator."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")
    table: ClassVar[str] = CLUSTER
    role: ClassVar[str] = "admin"

    coordinator: Annotated[str, AfterValidator(_peer_address), Unit("HOST:PORT")] = Field(
        "", validate_default=True, description=f"Address of the coordinator (default: {DEFAULT_SOCKET})."
    )


class CoordinatorSettings(TlsFiles, _Logging):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_COORDINATOR_")
    table: ClassVar[str] = "coordinator"
    role: ClassVar[str] = "coordinator"

    listen: Listen = Field(
        "",
        validate_default=True,
        description=f"Address to listen on; port 0 takes a free one (default: {DEFAULT_SOCKET}).",
    )
    state_dir: Annotated[Path, IsPath(), Unit("DIR")] = Field(
        description=f"Directory of the journal, on a local disk. {IN_MEMORY}: keep nothing."
    )
    http: PageListen = Field(
        DEFAULT_HTTP,
        description="Address of dashboard and metrics; port 0 takes a free one, off: none. If the default is in use, "
        "another port is taken.",
    )
    lease: Seconds = Field(
        3.0,
        ge=0.5,
        le=3600,
        description="Silence after which a worker counts as dead and its slots move.",
    )
    client_lease: Seconds = Field(
        10.0,
        ge=0.5,
        le=3600,
        description="Silence after which a training process counts as dead and its slots are freed.",
    )
    budget: Annotated[str, AfterValidator(_store_size), Unit("SIZE")] = Field(
        "",
        description="Size limit of snapshots, states and large arguments, such as 8GiB (default: 4GiB, or 40% of a "
        "smaller disk; in memory 512MiB).",
    )
    max_slots: Annotated[str, IsList(), AfterValidator(_slot_budgets), Unit("ROLE_OR_NAME=N")] = Field(
        "",
        description="Most slots at a time of tokens with this name (client/NAME:TOKEN), or, for client, of each other "
        "token; repeatable.",
    )
    balance_after: Seconds = Field(
        30.0,
        ge=0,
        le=86400,
        description="Time on a worker before a slot may migrate because the worker is slow or full; 0: never.",
    )
    on_end: Annotated[str, Unit("COMMAND")] = Field(
        "",
        description="Command that is run, without a shell, at the end of each run, with the reason as JSON on standard "
        "input (default: none).",
    )


class WorkerSettings(PeerSettings, _Logging):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WORKER_")
    table: ClassVar[str] = "worker"
    role: ClassVar[str] = "worker"

    slots: Count = Field(ge=1, le=4096, description="Largest number of runners here; usually one for each core.")
    allow: Modules = Field(
        description="Prefix of modules whose input_fn may run here, such as mypackage.data; repeatable. '*': any."
    )
    listen: LaneListen = Field(
        "127.0.0.1:0", description="Address for lanes from other machines; port 0 takes a free one."
    )
    runner_memory: MemorySize = Field(
        "",
        description="Memory limit of a runner, such as 4GiB: above it, the runner is replaced at a snapshot; above "
        "twice the limit, killed (default: none).",
    )
    liveness_file: FilePath = Field(
        "",
        description="File to write at each heartbeat, for `python -m penstock.deploy.probe` (default: none).",
    )
    http: PageListen = Field("", description="Address of /metrics; port 0 takes a free one (default: none).")
    name: Annotated[str, Unit("NAME")] = Field(
        "", max_length=200, description="Name of this worker, unique and stable (default: HOSTNAME:PID)."
    )
    drain: Seconds = Field(
        10.0,
        ge=0,
        le=3600,
        description="Longest time after SIGTERM to migrate slots, and to answer for jobs that save.",
    )
    runner_user: Annotated[str, Unit("USER")] = Field(
        "",
        max_length=200,
        description="User that your code runs as; only root's worker can (default: its own).",
    )
    runner_processes: Count = Field(
        0,
        ge=0,
        le=1 << 22,
        description="Largest number of processes and threads of the runner user; only with runner_user (default: "
        "no limit).",
    )
    no_sandbox: bool = Field(
        False,
        description="Run runners without the sandbox: they may gain privileges (sudo, fusermount), and signal and "
        "trace the user's other processes.",
    )

    @field_validator("allow")
    @classmethod
    def _prefixes(cls, value: str) -> str:
        prefixes = [prefix.strip() for prefix in value.split(",") if prefix.strip()]
        for prefix in prefixes:
            if not _MODULE.fullmatch(prefix):
                raise ValueError(
                    f"a module prefix must be like mypackage or mypackage.data, or '*' for all, got {prefix!r}. "
                    "Separate several prefixes by commas"
                )
        if not prefixes:
            raise ValueError("at least one module prefix must be given. Name your package, such as mypackage")
        return ",".join(prefixes)

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if value != value.strip() or not value.isprintable():
            raise ValueError("a name must be printable text without blanks at its ends")
        return value


class UpSettings(TlsFiles):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_UP_")
    table: ClassVar[str] = "up"

    engine: Literal["local", "ray"] = Field("local", description="Where the fleet runs: on this machine, or on Ray.")
    name: Annotated[str, AfterValidator(_fleet_name), Unit("NAME")] = Field(
        "penstock",
        description="Name of the fleet. Workers are called NAME-1, NAME-2.",
    )
    dir: Annotated[str, IsPath(), Unit("DIR")] = Field(
        "",
        description="Folder of the fleet's record, token and logs (default: XDG_STATE_HOME/penstock/NAME).",
    )
    workers: Count = Field(2, ge=1, le=10_000, description="Number of worker daemons.")
    slots: Count = Field(
        0,
        ge=0,
        le=4096,
        description="Slots of each worker (default: local: the cores, divided among workers; else 8).",
    )
    allow: Modules = Field("", description="Prefix of modules whose input_fn may run; repeatable. '*': any.")
    listen: FleetListen = Field(
        "",
        description="Address of the coordinator, also for other machines; port 0 takes a free one (default: a Unix "
        "socket in the fleet's folder). Ray: only the port is used, not 0 (default: 7070).",
    )
    timeout: Seconds = Field(120.0, ge=1, le=86_400, description="Seconds to wait until all is ready.")
    ray_address: Annotated[str, Unit("ADDRESS")] = Field(
        "auto", description="Ray: the cluster, as `ray.init` takes it."
    )
    near: Annotated[str, Unit("RESOURCE|KEY=VALUE")] = Field(
        "",
        description="Ray: put workers on nodes with this resource (accelerator_type:H100) or label.",
    )
    send_token: bool = Field(False, description="Ray: send the token through Ray, which stores it in clear text.")
    state_dir: Annotated[str, Unit("DIR")] = Field(
        "", description="Ray: the coordinator's journal, on a disk of its node (default: below /var/tmp)."
    )


SETTINGS_OF: dict[str, type[Section]] = {
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
    "client": JobSettings,
    "up": UpSettings,
}
"""Section of the settings file -> settings; client: a training job."""

_KUBERNETES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)")
"""Variables that Kubernetes puts into every pod for a Service with a name such as penstock-coordinator."""

_Section = TypeVar("_Section", bound=Section)


def flag(field: str) -> str:
    """Return the flag of a setting: "--state-dir" for "state_dir"."""
    return "--" + field.replace("_", "-")


def resolve(section: type[_Section], **flags: Any) -> _Section:
    """Return a command's settings from all sources. Raises InvalidArgumentError, which names every bad or missing one
    and its source."""
    given = {name: value for name, value in flags.items() if value is not None}
    refuse_unknown(section)
    check_file(*SETTINGS_OF.values())
    try:
        return section(**given)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(section, error, given)) from error


def refuse_unknown(section: type[Section]) -> None:
    """Raise InvalidArgumentError if a variable has the prefix of these settings but is none of them."""
    prefix = str(section.model_config.get("env_prefix", ""))
    if section is JobSettings or section.table == CLUSTER:  # their prefix begins all others
        return
    known = {variable(section, field) for field in section.names() if section.declaring(field) is section}
    for name in sorted(os.environ):
        if not name.upper().startswith(prefix) or name.upper() in known or _KUBERNETES.fullmatch(name):
            continue
        raise InvalidArgumentError(f"the environment variable {name} is not a setting{likely(name.upper(), known)}")


def _explain(section: type[Section], error: ValidationError, given: dict[str, Any]) -> str:
    parts, sources = [], stated(section)
    for detail in error.errors():
        field = field_of(section, detail["loc"])
        if detail["type"] == "missing":
            what = (section.model_fields[field].description or "").rstrip(".")
            parts.append(f"{flag(field)} (or the variable {variable(section, field)}) must be given: {what}")
        elif field in given:
            parts.append(f"{flag(field)} {detail['input']}: {reason_of(detail)}")
        else:
            source, _ = sources[field]
            named = source == variable(section, field)  # the name of a variable names the setting, that of the file not
            what = f"{source}={detail['input']}" if named else f"{source}: {field} = {detail['input']!r}"
            parts.append(f"{what}: {reason_of(detail)}")
    return "; ".join(parts)


def describe(settings: Section, **flags: Any) -> str:
    """Return every setting, its value and its source, for a daemon's log."""
    sources, parts = stated(type(settings)), []
    for field in settings.names():
        value = getattr(settings, field)
        source = flag(field) if flags.get(field) is not None else sources.get(field, ("default",))[0]
        parts.append(f"{field}={value if value != '' else '-'} ({source})")
    return ", ".join(parts)
