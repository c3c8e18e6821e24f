"""Typer options made from settings: a flag's help is its field's description, with its variable and its default.

Typer itself is told neither, so that a flag that was not given stays None and penstock.deploy.console.daemon_settings
alone decides what wins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.deploy.console.daemon_settings import (
    CoordinatorSettings,
    PeerSettings,
    Section,
    TelemetrySettings,
    TlsSettings,
    WorkerSettings,
    flag,
    variable,
)
from penstock.deploy.console.exit_codes import set_debug
from penstock.runtime.config import settings_file

__all__ = [
    "LARGEST",
    "LARGEST_BOX",
    "LARGEST_SEED",
    "Allow",
    "AsJson",
    "BalanceAfter",
    "Budget",
    "ClientLease",
    "ConfigFile",
    "Coordinator",
    "CoordinatorHttp",
    "CoordinatorInsecure",
    "CoordinatorListen",
    "Debug",
    "Drain",
    "Lease",
    "LivenessFile",
    "LogFormat",
    "Name",
    "NoCage",
    "Otel",
    "ParentPid",
    "ReadyFile",
    "RunnerMemory",
    "RunnerProcesses",
    "RunnerUser",
    "Slots",
    "StartTimeout",
    "Starts",
    "StateDir",
    "TlsCa",
    "TlsCert",
    "TlsKey",
    "TlsName",
    "TokenFile",
    "WorkerHttp",
    "WorkerInsecure",
    "WorkerListen",
    "option",
]


LARGEST = 2**63 - 1
"""Of a step or an attempt: what messages and the journal hold."""
LARGEST_BOX = 2**32 - 1
LARGEST_SEED = 2**64 - 1


def option(section: type[Section], field: str, metavar: str | None = None) -> Any:
    """Of a setting."""
    info = section.model_fields[field]
    facts = [variable(section, field)]
    if info.is_required():
        facts.append("required")
    elif info.default not in ("", False):
        facts.append(f"default: {info.default:g}" if isinstance(info.default, float) else f"default: {info.default}")
    # Two names: Typer would add --no-insecure otherwise, which says nothing that leaving it out does not.
    return typer.Option(flag(field), metavar=metavar, help=f"{info.description} [{'; '.join(facts)}]")


CoordinatorListen = Annotated[str | None, option(CoordinatorSettings, "listen", "HOST:PORT")]
CoordinatorHttp = Annotated[str | None, option(CoordinatorSettings, "http", "HOST:PORT")]
StateDir = Annotated[Path | None, option(CoordinatorSettings, "state_dir", "DIR")]
CoordinatorInsecure = Annotated[bool | None, option(CoordinatorSettings, "insecure")]
Lease = Annotated[float | None, option(CoordinatorSettings, "lease", "SECONDS")]
Budget = Annotated[str | None, option(CoordinatorSettings, "budget", "SIZE")]
BalanceAfter = Annotated[float | None, option(CoordinatorSettings, "balance_after", "SECONDS")]
ClientLease = Annotated[float | None, option(CoordinatorSettings, "client_lease", "SECONDS")]

Coordinator = Annotated[str | None, option(PeerSettings, "coordinator", "HOST:PORT")]
Slots = Annotated[int | None, option(WorkerSettings, "slots", "N")]
Allow = Annotated[list[str] | None, option(WorkerSettings, "allow", "PREFIX")]
WorkerListen = Annotated[str | None, option(WorkerSettings, "listen", "HOST:PORT")]
Starts = Annotated[int | None, option(WorkerSettings, "starts", "N")]
StartTimeout = Annotated[float | None, option(WorkerSettings, "start_timeout", "SECONDS")]
RunnerUser = Annotated[str | None, option(WorkerSettings, "runner_user", "USER")]
RunnerProcesses = Annotated[int | None, option(WorkerSettings, "runner_processes", "N")]
NoCage = Annotated[bool | None, option(WorkerSettings, "no_cage")]
NoGroups = Annotated[bool | None, option(WorkerSettings, "no_groups")]
RunnerMemory = Annotated[str | None, option(WorkerSettings, "runner_memory", "SIZE")]
LivenessFile = Annotated[str | None, option(WorkerSettings, "liveness_file", "PATH")]
Name = Annotated[str | None, option(WorkerSettings, "name", "NAME")]
WorkerHttp = Annotated[str | None, option(WorkerSettings, "http", "HOST:PORT")]
Drain = Annotated[float | None, option(WorkerSettings, "drain", "SECONDS")]
WorkerInsecure = Annotated[bool | None, option(WorkerSettings, "insecure")]

LogFormat = Annotated[str | None, option(TelemetrySettings, "log_format", "text|json")]
Otel = Annotated[bool | None, option(TelemetrySettings, "otel")]

TlsCa = Annotated[str | None, option(TlsSettings, "tls_ca", "FILE")]
TlsCert = Annotated[str | None, option(TlsSettings, "tls_cert", "FILE")]
TlsKey = Annotated[str | None, option(TlsSettings, "tls_key", "FILE")]
TlsName = Annotated[str | None, option(TlsSettings, "tls_name", "NAME")]

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File that holds the token, or lines ROLE:TOKEN. [PENSTOCK_TOKEN, else PENSTOCK_TOKEN_FILE]",
    ),
]


def _use_config(path: Path | None) -> Path | None:
    """Through the environment, so that processes that this one starts read the same file."""
    if path is not None:
        os.environ[settings_file.VARIABLE] = os.fspath(path.absolute())
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_use_config,
        is_eager=True,
        help="Settings file. [PENSTOCK_CONFIG, else ~/.config/penstock/config.toml, else /etc/penstock/penstock.toml]",
    ),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        "--ready-file",
        metavar="PATH",
        help="File to write the line to that is printed once this is ready, for scripts.",
    ),
]
ParentPid = Annotated[
    int | None,
    typer.Option(
        "--parent-pid",
        metavar="PID",
        min=1,
        hidden=True,  # for programs that start this as their child
        help="End when this process, the parent, is gone however it ends; Ctrl-C is left to it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[
    bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Log more, and show tracebacks of errors.")
]
