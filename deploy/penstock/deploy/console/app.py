"""How commands are made, with the options that all have. A parameter `peer` stands for the options of the
coordinator's address and of the credentials."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import ConfigFile, Debug, OwnJob, TokenFile, flags_of
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import PeerSettings
from penstock.runtime.config.settings import Section

EPILOG = "Exit codes: penstock --exit-codes. More: docs/cli.md"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class App(typer.Typer):
    """Typer application whose commands have `--config` and `--debug`, and end with an exit code (`guarded`)."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        add = super().command(name, **{"epilog": EPILOG, **settings})
        return lambda command: add(completed(guarded(command)))


_PEER = {**flags_of(PeerSettings), "job": OwnJob, "token_file": TokenFile}


def completed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the options for which a parameter `peer`, or `Annotated[Flags, WorkerSettings]`, stands,
    and with `--config` and `--debug`."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, dict[str, Any]] = {}
    options: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        settings = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if parameter.name == "peer":
            groups["peer"] = _PEER
        elif isinstance(settings, type) and issubclass(settings, Section):
            groups[parameter.name] = flags_of(settings)
        else:
            options[parameter.name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        options |= {name: _option(name, annotation) for name, annotation in groups[parameter.name].items()}
    takes_debug = "debug" in options
    options |= {"config": _option("config", ConfigFile), "debug": _option("debug", Debug, False)}

    @functools.wraps(command)
    def run(*, config: object = None, debug: bool = False, **given: Any) -> Any:
        if takes_debug:
            given["debug"] = debug
        for parameter, names in groups.items():
            flags = {name: _as_text(given.pop(name)) for name in names}
            given[parameter] = Peer(**flags) if parameter == "peer" else flags
        if "peer" in groups:
            quiet_grpc()
        return command(**given)

    run.__signature__ = signature.replace(parameters=list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in options.items()}
    return run


def _as_text(value: Any) -> Any:
    """Return a flag's value; a list (a flag that may be repeated) as one text with commas, None if empty."""
    return (",".join(value) if value else None) if isinstance(value, list) else value


def _option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def subcommands(cls: type[TyperGroup] = TyperGroup, **settings: Any) -> App:
    return App(cls=cls, epilog=EPILOG, rich_markup_mode=None, context_settings=CONTEXT, **settings)


def quiet_grpc() -> None:
    """Stop gRPC from writing to standard error: our errors say the same. Not for workers: runners would inherit it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
