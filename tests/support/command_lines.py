"""Check of the commands that a page shows: the command, its options, the make target, the module exist.

Values are not looked at, for a page may say HOST:PORT. Nothing is run.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from penstock.deploy.cli.main import app

__all__ = ["commands", "problem"]

REPO = Path(__file__).parents[2]
_KNOWN = {"penstock", "make", "python", "python3", "torchrun", "pip"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BETWEEN = re.compile(r"[();<>|&]+")
_PREFIXES = {"export", "exec", "nohup", "time", "timeout", "srun", "sudo"}


def commands(text: str) -> Iterator[list[str]]:
    """The commands of these programs in the text, as words: lines that begin with one, behind a prompt and assignments.
    Other lines are output, or other programs."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip().removeprefix("$ ")
        if not set(re.split(r"[\s/]+", line)) & _KNOWN:
            continue
        lexer = shlex.shlex(re.sub(r"\s\d>", " >", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a quote that does not end: prose, or the output of something
        simple: list[str] = []
        for word in [*words, ";"]:
            if not _BETWEEN.fullmatch(word):
                simple.append(word)
                continue
            while simple and (_ASSIGNMENT.fullmatch(simple[0]) or simple[0] in _PREFIXES):
                simple.pop(0)
            if simple and Path(simple[0]).name in _KNOWN:
                yield [Path(simple[0]).name, *simple[1:]]
            simple = []


def problem(words: list[str]) -> str | None:
    """Why this command cannot be meant; None if it can."""
    program, *arguments = words
    match program:
        case "penstock":
            return _penstock(arguments)
        case "make":
            goals = [word for word in arguments if "=" not in word and not word.startswith("-")]
            lacking = [goal for goal in goals if goal not in _targets()]
            return f"the Makefile has no target {lacking[0]}" if lacking else None
        case "pip":
            return _pip(arguments)
        case _:
            return _python(arguments)


def _penstock(arguments: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("penstock", [], resilient_parsing=True)
    while hasattr(command, "resolve_command"):
        if not arguments or arguments[0] not in command.commands:
            meant = _meant(command.name, arguments)
            if meant is None:
                if arguments and not arguments[0].startswith("-"):
                    return f"there is no command {arguments[0]}"
                break
            arguments = [meant, *arguments]
        command, arguments = command.commands[arguments[0]], arguments[1:]
        context = type(context)(command, parent=context, info_name=command.name)
    try:
        given, left, _ = command.make_parser(context).parse_args([word.strip("[]") for word in arguments])
    except Exception as error:  # click's, whose place depends on typer's version
        return f"{command.name}: {getattr(error, 'message', None) or error}"
    if {"help", "version"} & given.keys():
        return None
    if left and left[0] != "...":  # and so on: prose
        return f"{command.name}: too many arguments, from {left[0]!r} on"
    for parameter in command.params:
        if parameter.required and given.get(parameter.name) is None:
            return f"{command.name}: {parameter.opts[0]} is missing"
    return None


def _meant(group: str, arguments: list[str]) -> str | None:
    """The command of this group that is meant where none is named."""
    target = bool(arguments) and not arguments[0].startswith("-")
    match group:
        case "state":
            return "show" if target else None
        case "doctor":
            return "loader" if target else "machine"
        case _:
            return None


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([\w.-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))


def _pip(arguments: list[str]) -> str | None:
    with (REPO / "pyproject.toml").open("rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:penstock|\.)\[([\w, -]+)\]", " ".join(arguments)):
        lacking = {extra.strip() for extra in extras.split(",")} - known.keys()
        if lacking:
            return f"Penstock has no extra {min(lacking)}"
    return None


FRAMEWORKS = {"torchtitan.train"}
"""Modules of frameworks that only `make frameworks` installs, which runs them."""


def _python(arguments: list[str]) -> str | None:
    """A module (`-m`) or file of the repository must be there; a file without a folder is the user's own."""
    for place, word in enumerate(arguments):
        if word == "-m" and place + 1 < len(arguments):
            module = arguments[place + 1]
            path = module.replace(".", "/")
            if any((root / f"{path}.py").is_file() for root in (REPO, REPO / "examples")) or module in FRAMEWORKS:
                return None
            try:
                found = importlib.util.find_spec(module)
            except ImportError:
                found = None
            return None if found is not None else f"there is no module {module}"
        if word.endswith(".py"):
            inside = "/" in word and not word.startswith(("/", "~", "$"))
            return f"there is no file {word}" if inside and not (REPO / word).is_file() else None
    return None
