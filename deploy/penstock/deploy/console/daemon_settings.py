"""Settings of daemons and commands: their names, valid values and descriptions.

The variables of a daemon carry its name (PENSTOCK_COORDINATOR_LISTEN, PENSTOCK_WORKER_SLOTS), so that one environment
can hold the settings of both daemons. PENSTOCK_COORDINATOR, PENSTOCK_TOKEN, PENSTOCK_TOKEN_FILE and PENSTOCK_TLS_* are
shared with the training job. In the settings file each daemon has a section of its own, and shared settings are in
[cluster]. settings_sources.py finds the values.

The token is not among these settings: see command_token.py. None of them is secret, so a daemon can log them all.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_settings import SettingsConfigDict

from penstock.deploy.console.settings_sources import describe, flag, resolve, variable
from penstock.proto.rpc.addresses import socket_path
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.runtime.config.job_settings import TlsFiles
from penstock.runtime.config.settings import IN_MEMORY, FilePath, IsList, IsPath, Section, Unit
from penstock.runtime.config.settings_file import CLUSTER
from penstock.runtime.config.sizes import bytes_of

__all__ = [
    "IN_MEMORY",
    "CoordinatorSettings",
    "PeerSettings",
    "Section",
    "TelemetrySettings",
    "TlsSettings",
    "WorkerSettings",
    "bytes_of",
    "describe",
    "flag",
    "lane_address",
    "listen_address",
    "memory_size",
    "resolve",
    "variable",
]

DEFAULT_COORDINATOR = "127.0.0.1:7070"
DEFAULT_HTTP = "127.0.0.1:7071"
_MODULE = re.compile(r"\*|[^\W\d]\w*(\.[^\W\d]\w*)*")


def listen_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host.isprintable() or " " in host:
        raise ValueError(
            f"a host must be printable text without blanks, got {host!r}. Correct the host before the colon"
        )
    if "/" in value:
        raise ValueError(
            'an address must be "HOST:PORT", without a scheme or path. Leave out what is not host and port'
        )
    if host and port.isascii() and port.isdigit() and int(port) <= 65535:
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(f"an IPv6 address must be in brackets. Write [{host}]:{port}")
        return value
    raise ValueError(
        'an address must be "HOST:PORT" with a port from 0 to 65535. Port 0 means any free port to listen on'
    )


def _page_address(value: str) -> str:
    return "" if value.lower() in ("", "off") else listen_address(value)


def _peer_address(value: str) -> str:
    if (path := socket_path(value)) is not None and path.is_absolute():
        return value
    if value.endswith(":0"):
        raise ValueError(
            'an address to connect to must be "HOST:PORT" with the port that the coordinator printed, not 0'
        )
    return listen_address(value)


def lane_address(value: str) -> str:
    host = listen_address(value).rpartition(":")[0].strip("[]")
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if unspecified:
        raise ValueError(
            f"must be an address that other machines can connect to, got {host}. Set the address of this machine"
        )
    return value


def memory_size(value: str) -> str:
    if value and not re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B?", value):
        raise ValueError("a size must be a number of bytes, or a number with a unit, such as 500MiB or 4GiB")
    if value and bytes_of(value) < 1 << 20:
        raise ValueError("the memory of a runner must be at least 1 MiB. Give a larger size, such as 4GiB")
    return value


def _store_size(value: str) -> str:
    bytes_of(value)
    return value


Seconds = Annotated[float, Unit("SECONDS"), Field(allow_inf_nan=False)]
Count = Annotated[int, Unit("N")]
Listen = Annotated[str, AfterValidator(listen_address), Unit("HOST:PORT")]
LaneListen = Annotated[str, AfterValidator(lane_address), Unit("HOST:PORT")]
PageListen = Annotated[str, AfterValidator(_page_address), Unit("HOST:PORT")]
Peer = Annotated[str, AfterValidator(_peer_address), Unit("HOST:PORT")]
MemorySize = Annotated[str, AfterValidator(memory_size), Unit("SIZE")]
Modules = Annotated[str, IsList(), Unit("PREFIX")]


class PeerSettings(Section):
    """Settings of workers and of the commands that call the coordinator."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")
    table: ClassVar[str] = CLUSTER

    coordinator: Peer = Field(DEFAULT_COORDINATOR, description="Address of the coordinator, HOST:PORT.")


class TlsSettings(TlsFiles):
    """TLS settings of daemons and of the commands that connect to them."""

    def load(self) -> Tls | None:
        """Return the TLS files, read and checked; None without TLS. Raises TlsError, which names the file and the
        remedy."""
        return load_tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)


class TelemetrySettings(Section):
    """Settings of both daemons for logs."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")
    table: ClassVar[str] = CLUSTER

    log_format: Literal["text", "json"] = Field(
        "text",
        description="Format of the log: text for people, or json: one object a line, with run, box, slot and step.",
    )


class CoordinatorSettings(Section):
    """Settings of `penstock coordinator`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_COORDINATOR_")
    table: ClassVar[str] = "coordinator"

    listen: Listen = Field(DEFAULT_COORDINATOR, description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    state_dir: Annotated[Path, IsPath(), Unit("DIR")] = Field(
        description=f"Directory of the journal, on a local disk; created if missing. {IN_MEMORY}: keep nothing."
    )
    http: PageListen = Field(
        DEFAULT_HTTP,
        description="Address of the dashboard and its data, HOST:PORT; port 0 takes a free one, off: none. If the "
        "default is in use, another port is taken, and the log says which.",
    )
    insecure: bool = Field(False, description="Listen beyond this machine without TLS.")
    lease: Seconds = Field(
        3.0,
        ge=0.5,
        le=3600,
        description="Seconds of silence after which a worker counts as dead and its slots move to others.",
    )
    client_lease: Seconds = Field(
        10.0,
        ge=0.5,
        le=3600,
        description="Seconds of silence after which a training process counts as dead and its slots are freed.",
    )
    budget: Annotated[str, AfterValidator(_store_size), Unit("SIZE")] = Field(
        "",
        description="Size limit of the store of snapshots, states to resume from and large arguments, such as 8GiB "
        "(default: 4GiB; 512MiB if kept in memory).",
    )
    balance_after: Seconds = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds that a slot stays on a worker before it may migrate away from a slow or full worker; 0: "
        "slots migrate only if their worker is lost or drained.",
    )


class WorkerSettings(Section):
    """Settings of `penstock worker`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WORKER_")
    table: ClassVar[str] = "worker"

    slots: Count = Field(
        ge=1, le=4096, description="Largest number of runners here at a time; usually one for each CPU core."
    )
    allow: Modules = Field(
        description="Prefix of modules whose input_fn may run here: mypackage, mypackage.data; repeatable. '*': any."
    )
    listen: LaneListen = Field(
        "127.0.0.1:0", description="Address for lanes from other machines, HOST:PORT; port 0 takes a free one."
    )
    runner_memory: MemorySize = Field(
        "",
        description="Memory limit of a runner, such as 4GiB or 500MiB. Above it, the runner is replaced at a snapshot; "
        "above twice the limit, it is killed (default: no limit).",
    )
    starts: Count = Field(
        0,
        ge=0,
        le=4096,
        description="Largest number of runners that start at a time; the others wait in a queue (default, 0: one for "
        "each CPU core).",
    )
    start_timeout: Seconds = Field(
        600.0,
        ge=1,
        le=86400,
        description="Seconds that the interpreter of a run's runners may take to start, or a tenth of that if it uses "
        "no processor time; then it is killed and started again.",
    )
    liveness_file: FilePath = Field(
        "",
        description="File to write at each heartbeat, by which `python -m penstock.deploy.probe` checks that this "
        "worker makes progress (default: none).",
    )
    http: PageListen = Field(
        "", description="Address of /metrics and /healthz, HOST:PORT; port 0 takes a free one (default: none)."
    )
    name: Annotated[str, Unit("NAME")] = Field(
        "", max_length=200, description="Name of this worker, unique and stable (default: HOSTNAME:PID)."
    )
    drain: Seconds = Field(
        10.0,
        ge=0,
        le=3600,
        description="Longest time that this worker keeps running after SIGTERM, while its slots migrate, in seconds.",
    )
    runner_user: Annotated[str, Unit("USER")] = Field(
        "",
        max_length=200,
        description="User that your code runs as, by name or number; only root's worker can (default: its own).",
    )
    runner_processes: Count = Field(
        0,
        ge=0,
        le=1 << 22,
        description="Largest number of processes and threads of the runner user on this machine, over all runners; "
        "only with runner_user (default: no limit).",
    )
    no_sandbox: bool = Field(
        False,
        description="Run runners without the sandbox: they may gain privileges (sudo, fusermount), and signal and "
        "trace other processes of the user.",
    )
    insecure: bool = Field(False, description="Listen beyond this machine without TLS.")

    @property
    def prefixes(self) -> list[str]:
        """Return the module prefixes in the setting `allow`."""
        return self.allow.split(",")

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
