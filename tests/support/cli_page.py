"""The part of the page docs/cli.md that `make docs` makes from the commands: their help, options and exit codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import typer.main

from penstock.deploy.cli.main import app
from penstock.deploy.console.exit_codes import CODES

SHARED = {
    "Coordinator": ("coordinator", "job", "token_file"),
    "TLS": ("tls_ca", "tls_cert", "tls_key", "tls_name", "credentials", "insecure"),
    "General": ("as_json", "config", "debug", "help", "install_completion", "show_completion", "version"),
}
"""Heading -> names of options that many commands have."""


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield name and command of all commands below a group, the group itself included."""
    yield name, command
    for below in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from commands(command.commands[below], f"{name} {below}")


def by_heading(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    headed: dict[str, list[Any]] = {"Arguments": [], "Options": [], **{head: [] for head in SHARED}}
    for parameter in parameters:
        own = "Arguments" if parameter.param_type_name == "argument" else "Options"
        headed[next((head for head, names in SHARED.items() if parameter.name in names), own)].append(parameter)
    return headed


def described(parameters: Iterable[Any]) -> dict[str, str]:
    """Return options and arguments as a user writes them, each with its meaning."""
    meanings = {}
    for parameter in parameters:
        if parameter.hidden or not parameter.help:
            continue
        facts = ["required"] if parameter.required and parameter.param_type_name == "option" else []
        facts += [f"default: {parameter.default:g}"] if type(parameter.default) in (int, float) else []
        words = parameter.opts if parameter.param_type_name == "option" else ()
        written = " ".join([", ".join(words), *([parameter.metavar] if parameter.metavar else [])]).strip()
        meanings[written] = parameter.help + (f" [{'; '.join(facts)}]" if facts else "")
    return meanings


def listed(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in rows)


def section(name: str, command: Any) -> str:
    """Return the section of a command: its help, without the examples and the options that many commands have."""
    parameters = by_heading(command.params)
    usage = " ".join([name, *(argument.metavar for argument in parameters["Arguments"])])
    text = (command.help or "").partition("\b\nExamples:\n")[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    if hasattr(command, "commands"):
        paragraphs.append(f"Commands: {', '.join(command.list_commands(None))}.")
    shared = [head for head in ("Coordinator", "TLS") if parameters[head]]
    own = described([*parameters["Arguments"], *parameters["Options"]])
    lists = [f"Options: {', '.join(shared)} (above){', and:' if own else '.'}"] if shared else []
    lists += [listed(own.items())] if own else []
    return "\n\n".join([f"## {name}", *([f"`{usage}`"] if usage != name else []), *paragraphs, *lists])


def made() -> str:
    """Return the part of the page that is made from the commands."""
    everything = list(commands(typer.main.get_command(app), "penstock"))
    shared: dict[str, dict[str, str]] = {head: {} for head in SHARED}
    for _, command in everything:
        for head, parameters in by_heading(command.params).items():
            if head in shared:
                shared[head] |= described(parameters)
    parts = [
        "\n## Exit codes",
        "A number keeps its meaning for ever. [Errors](errors.md) has the code of each error.",
    ]
    parts += [listed((str(code.number), code.meaning) for code in CODES), "## Options that many commands have"]
    parts += [f"**{head}**\n\n{listed(options.items())}" for head, options in shared.items()]
    return "\n\n".join([*parts, *(section(*command) for command in everything[1:])]) + "\n"
