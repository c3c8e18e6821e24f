"""Options of commands. A flag's help is the description of its setting. Typer is told neither variable nor default: a
flag that was not given is None, and penstock.deploy.console.settings alone decides which source wins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from penstock.deploy.console.exit_codes import set_debug
from penstock.deploy.console.settings import flag
from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.config import settings_file
from penstock.runtime.config.settings import IsList, Section, Unit, is_marked, variable

LARGEST = 2**63 - 1
"""Largest step or attempt of an option, as in messages and in the journal."""
LARGEST_BOX = 2**32 - 1
LARGEST_SEED = 2**64 - 1

Flags = dict[str, Any]
"""Parameter for all flags of settings, `Annotated[Flags, WorkerSettings]`: setting -> value, None if not given."""


def option(section: type[Section], field: str) -> Any:
    info = section.model_fields[field]
    facts = [variable(section, field)]
    if info.is_required():
        facts.append("required")
    elif info.default not in ("", False):
        facts.append(f"default: {info.default:g}" if isinstance(info.default, float) else f"default: {info.default}")
    choices = "|".join(get_args(info.annotation)) if get_origin(info.annotation) is Literal else None
    unit = next((fact.name for fact in info.metadata if isinstance(fact, Unit)), choices)
    # The name is given so that Typer does not add a useless --no-insecure.
    return typer.Option(flag(field), metavar=unit, help=f"{info.description} [{'; '.join(facts)}]")


def flags_of(section: type[Section]) -> dict[str, Any]:
    annotations: dict[str, Any] = {}
    for field in section.names():
        info = section.model_fields[field]
        kind: Any = info.annotation if info.annotation in (bool, int, float, Path) else str
        kind = list[str] if is_marked(info, IsList) else kind
        annotations[field] = Annotated[kind | None, option(section, field)]
    return annotations


def listed(option: str, text: str) -> list[str]:
    """Return the values in a text such as "A,B". Raises InvalidArgumentError if one is empty."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise InvalidArgumentError(
            f"{option} must be values separated by commas, none of them empty, got {text!r}. Give the values, or leave "
            "the option out"
        )
    return values


def pairs_of(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return values by name, from texts "NAME=VALUE". Raises InvalidArgumentError, also for a repeated name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InvalidArgumentError(
                f"{option} must have the form NAME=VALUE, got {text!r}. Put the name and = before the value"
            )
        if name in pairs:
            raise InvalidArgumentError(f"{option} must have each name once, got {name!r} twice. Leave one out")
        pairs[name] = value
    return pairs


TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the token, or with lines ROLE:TOKEN. [PENSTOCK_TOKEN, else PENSTOCK_TOKEN_FILE]",
    ),
]


OwnJob = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="NAME",
        help="Job (embedded) or fleet (`penstock up`) to call, if several run here.",
    ),
]


def _use_config(path: Path | None) -> Path | None:
    """Set the path of the settings file as a variable, so that child processes read the same file."""
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
        help="File to write the printed line to once the daemon is ready, for scripts.",
    ),
]
ParentPid = Annotated[
    int | None,
    typer.Option(
        "--parent-pid",
        metavar="PID",
        min=1,
        hidden=True,  # for programs that start this process as their child
        help="End when the parent process with this id ends or shuts down the socket of standard input.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[
    bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Log more, and show tracebacks of errors.")
]
