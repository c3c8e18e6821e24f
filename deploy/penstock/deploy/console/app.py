"""How commands are made: the layout of their help, and the options that all have. A parameter `peer` stands for the
options of the coordinator's address and of the credentials."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import ConfigFile, Debug, OwnJob, TokenFile, flags_of
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import PeerSettings
from penstock.runtime.config.settings import Section

EPILOG = "Exit codes: penstock --help. More: docs/cli.md"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

SECTIONS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Coordinator", frozenset(("coordinator", "job", "token_file"))),
    ("TLS", frozenset(("tls_ca", "tls_cert", "tls_key", "tls_name"))),
    ("General", frozenset(("as_json", "config", "debug", "help", "install_completion", "show_completion", "version"))),
)
"""Headings in a command's help for shared options, after its own: heading, names of options."""


def by_heading(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return a command's parameters by heading, its own under "Arguments" and "Options"."""
    headed: dict[str, list[Any]] = {"Arguments": [], "Options": [], **{head: [] for head, _ in SECTIONS}}
    for parameter in parameters:
        own = "Arguments" if parameter.param_type_name == "argument" else "Options"
        headed[next((head for head, names in SECTIONS if parameter.name in names), own)].append(parameter)
    return headed


def _format_options(command: Any, ctx: Any, formatter: Any) -> None:
    for head, parameters in by_heading(command.get_params(ctx)).items():
        records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
        if records:
            with formatter.section(head):
                formatter.write_dl(records)


class _Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class Group(TyperGroup):
    """Group of commands whose help lists them under headings, by purpose."""

    heads: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Heading -> its commands, in the order of the help. All others come under "Commands"."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the headings, also for shell completion."""
        order = [name for commands in self.heads.values() for name in commands]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        listed = {name for commands in self.heads.values() for name in commands}
        rest = {"Commands": tuple(name for name in names if name not in listed)}
        for head, commands in {**self.heads, **rest}.items():
            rows = [(name, _first_line(self.commands[name])) for name in commands if name in names]
            if rows:
                with formatter.section(head):
                    formatter.write_dl(rows)


def _first_line(command: Any) -> str:
    """Return the first paragraph of the help as one line. (Typer's own short help would be cut off.)"""
    return " ".join((command.help or "").split("\n\n")[0].split())


class App(typer.Typer):
    """Typer application whose commands have `--config` and `--debug`, and end with an exit code (`guarded`)."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        add = super().command(name, **{"cls": _Command, "epilog": EPILOG, **settings})
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


def subcommands(cls: type[Group] = Group, **settings: Any) -> App:
    return App(cls=cls, epilog=EPILOG, rich_markup_mode=None, context_settings=CONTEXT, **settings)


def quiet_grpc() -> None:
    """Stop gRPC from writing to standard error: our errors say the same. Not for workers: runners would inherit it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
