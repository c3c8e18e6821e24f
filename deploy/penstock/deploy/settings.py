"""What a command was given: flags over PENSTOCK_* variables over defaults, complete and checked.

A daemon's variables carry its name (PENSTOCK_COORDINATOR_LISTEN, PENSTOCK_WORKER_SLOTS), so that one environment can
hold the settings of both; PENSTOCK_COORDINATOR, PENSTOCK_TOKEN, PENSTOCK_TOKEN_FILE and PENSTOCK_TLS_* are shared with
the training job. A variable with a daemon's name and an unknown rest is an error, for a setting that is silently not
applied is worse than a daemon that does not start. Only the variables that Kubernetes makes of a Service's name are
let be.

The token is no field here: see tokens.py. Nothing in a model is secret, so that a daemon can log what it runs with.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.tls import Tls, load_tls

__all__ = [
    "CoordinatorSettings",
    "PeerSettings",
    "Section",
    "TlsSettings",
    "WorkerSettings",
    "bytes_of",
    "describe",
    "flag",
    "lane_address",
    "memory_size",
    "resolve",
    "variable",
]

DEFAULT_COORDINATOR = "127.0.0.1:7070"
IN_MEMORY = ":memory:"

_KUBERNETES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)")
"""What a Service named penstock-coordinator puts into every pod's environment."""
_MODULE = re.compile(r"\*|[^\W\d]\w*(\.[^\W\d]\w*)*")


def _listen_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if host and port.isascii() and port.isdigit() and int(port) <= 65535:
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(f"an IPv6 address goes in brackets: [{host}]:{port}")
        return value
    raise ValueError('an address is "HOST:PORT"; port 0 takes a free one')


def _peer_address(value: str) -> str:
    if value.startswith("unix-abstract:") and len(value) > len("unix-abstract:"):
        return value
    if value.endswith(":0"):
        raise ValueError('an address to connect to is "HOST:PORT" with the port that the coordinator printed, not 0')
    return _listen_address(value)


def lane_address(value: str) -> str:
    host = _listen_address(value).rpartition(":")[0].strip("[]")
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if unspecified:
        raise ValueError(
            f"boxes on other machines are told this address and cannot connect to {host}: give this machine's"
        )
    return value


def bytes_of(size: str) -> int:
    """Of "4GiB", "500MiB"; 0 of ""."""
    if not size:
        return 0
    number, unit = re.fullmatch(r"([0-9.]+)\s*([KMGT]i?)?B?", size).groups()  # type: ignore[union-attr]
    return int(float(number) * 1024 ** " KMGT".index((unit or " ")[0]))


def memory_size(value: str) -> str:
    if value and not re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B?", value):
        raise ValueError("a size is a number with a unit: 500MiB, 4GiB, 1.5GiB")
    if value and bytes_of(value) < 1 << 20:
        raise ValueError("a runner needs more than 1 MiB")
    return value


class Section(BaseSettings):
    """The settings of one command."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True)
    daemon: ClassVar[bool] = False
    """Its variables have a prefix of their own."""


class PeerSettings(Section):
    """Of commands that ask the coordinator something."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")

    coordinator: Annotated[str, AfterValidator(_peer_address)] = Field(
        DEFAULT_COORDINATOR, description="Address of the coordinator, HOST:PORT."
    )


class TlsSettings(Section):
    """Of every command that listens for others or calls the coordinator. The files hold no secret in their names."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")

    tls_ca: str = Field(
        "",
        description="File with the CA that the other end's certificate must be signed by; on a coordinator: callers "
        "must show certificates.",
    )
    tls_cert: str = Field("", description="File with the certificate to show.")
    tls_key: str = Field("", description="File with its key, readable by its owner.")
    tls_name: str = Field("", description="Name to expect in the other end's certificate, instead of its address.")

    def load(self) -> Tls | None:
        """The files, read and checked. TlsError names the file and the remedy."""
        return load_tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)


class CoordinatorSettings(Section):
    """Of `penstock coordinator`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_COORDINATOR_")
    daemon: ClassVar[bool] = True

    listen: Annotated[str, AfterValidator(_listen_address)] = Field(
        DEFAULT_COORDINATOR, description="Address to listen on, HOST:PORT; port 0 takes a free one."
    )
    state_dir: Path = Field(
        description=f"Directory of the journal, on a local disk; made if it is not there. {IN_MEMORY}: keep nothing."
    )
    insecure: bool = Field(False, description="Listen beyond this machine without TLS.")
    lease: float = Field(
        3.0,
        ge=0.5,
        le=3600,
        allow_inf_nan=False,
        description="Seconds of silence after which a worker is taken for dead and its slots are handed on.",
    )
    client_lease: float = Field(
        10.0,
        ge=0.5,
        le=3600,
        allow_inf_nan=False,
        description="Seconds of silence after which a training process is taken for dead and its workers are freed.",
    )


class WorkerSettings(Section):
    """Of `penstock worker`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WORKER_")
    daemon: ClassVar[bool] = True

    slots: int = Field(
        ge=1, le=4096, description="Runners that may run here at a time: one for each CPU core is usual."
    )
    allow: str = Field(
        description="Prefix of modules whose input_fn may run here: mypackage, mypackage.data; repeatable. '*': any."
    )
    listen: Annotated[str, AfterValidator(lane_address)] = Field(
        "127.0.0.1:0", description="Address for lanes from other machines, HOST:PORT; port 0 takes a free one."
    )
    runner_memory: Annotated[str, AfterValidator(memory_size)] = Field(
        "",
        description="Memory that a runner may hold, as 4GiB or 500MiB: above it the runner is recycled at a snapshot, "
        "above twice as much killed (default: any).",
    )
    name: str = Field("", max_length=200, description="Name of this worker, unique and stable (default: HOSTNAME:PID).")
    insecure: bool = Field(False, description="Listen beyond this machine without TLS.")

    @property
    def prefixes(self) -> list[str]:
        """`allow`, taken apart."""
        return self.allow.split(",")

    @field_validator("allow")
    @classmethod
    def _prefixes(cls, value: str) -> str:
        prefixes = [prefix.strip() for prefix in value.split(",") if prefix.strip()]
        for prefix in prefixes:
            if not _MODULE.fullmatch(prefix):
                raise ValueError(
                    f"{prefix!r} is no module name; give module prefixes (mypackage, mypackage.data) or '*'"
                )
        if not prefixes:
            raise ValueError("no module prefix is given, so no input_fn could run here")
        return ",".join(prefixes)

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if value != value.strip() or not value.isprintable():
            raise ValueError("a name is printable text without blanks at its ends")
        return value


_Section = TypeVar("_Section", bound=Section)


def variable(section: type[Section], field: str) -> str:
    """The environment variable of a field."""
    return f"{section.model_config.get('env_prefix', '')}{field}".upper()


def flag(field: str) -> str:
    """The flag of a field."""
    return "--" + field.replace("_", "-")


def resolve(section: type[_Section], **flags: Any) -> _Section:
    """The settings of a command. `flags`: what was given on the command line; None was not.

    Raises InvalidArgumentError that names every bad or missing setting and where it came from.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if section.daemon:
        _refuse_unknown(section)
    try:
        return section(**given)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(section, error, given)) from error


def _refuse_unknown(section: type[Section]) -> None:
    prefix = str(section.model_config.get("env_prefix", ""))
    known = {variable(section, field) for field in section.model_fields}
    for name in sorted(os.environ):
        if not name.upper().startswith(prefix) or name.upper() in known or _KUBERNETES.fullmatch(name):
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1)
        hint = f"; is {near[0]} meant?" if near else f" (there are {', '.join(sorted(known))})"
        raise InvalidArgumentError(f"the environment variable {name} names no setting{hint}")


def _explain(section: type[Section], error: ValidationError, given: dict[str, Any]) -> str:
    parts = []
    for detail in error.errors():
        field = str(detail["loc"][0]) if detail["loc"] else "?"
        if field.upper().startswith("PENSTOCK_"):
            field = field[len(str(section.model_config.get("env_prefix", ""))) :].lower()
        name = variable(section, field)
        if detail["type"] == "missing":
            what = section.model_fields[field].description if field in section.model_fields else ""
            parts.append(f"{flag(field)} is missing (or the variable {name}): {what}")
            continue
        reason = detail["msg"].removeprefix("Value error, ")
        reason = "it " + reason.removeprefix("Input ") if reason.startswith("Input ") else reason
        source = f"{flag(field)} {detail['input']}" if field in given else f"{name}={detail['input']}"
        parts.append(f"{source}: {reason}")
    return "; ".join(parts)


def describe(settings: Section, **flags: Any) -> str:
    """Every setting with its value and where it came from, for the log of a daemon."""
    section = type(settings)
    upper = {name.upper() for name, value in os.environ.items() if value}
    parts = []
    for field in section.model_fields:
        if flags.get(field) is not None:
            source = flag(field)
        elif variable(section, field) in upper:
            source = variable(section, field)
        else:
            source = "default"
        value = getattr(settings, field)
        parts.append(f"{field}={value if value != '' else '-'} ({source})")
    return ", ".join(parts)
