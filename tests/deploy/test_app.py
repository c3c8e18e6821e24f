"""Rules for every command, also for those added later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from penstock.deploy.cli.main import app

WITHOUT_DATA = {"coordinator", "worker", "worker drain", "up", "down", "demo"}
"""Commands without --json: they run until they are ended, or do one thing, and have nothing to print."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield " ".join((*path, name)), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))
LEAVES = {name: command for name, command in ALL.items() if name == "worker" or not hasattr(command, "commands")}


@pytest.mark.parametrize("name", ALL)
def test_help_teaches(name: str) -> None:
    command = ALL[name]
    context = command.make_context(f"penstock {name}", [], parent=None, resilient_parsing=True)
    text = command.get_help(context)
    assert "Examples:\n" in text, "its help has no examples"
    example = text.partition("Examples:\n")[2].partition("\n\n")[0]
    assert f"penstock {name.split()[0]}" in example
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} has no help"


@pytest.mark.parametrize("name", LEAVES)
def test_options_that_all_have(name: str) -> None:
    options = {option for parameter in LEAVES[name].params for option in parameter.opts}
    assert "--config" in options
    assert "--json" in options or name in WITHOUT_DATA
    assert not {"--token", "--no-json", "--no-debug"} & options


def test_json_error_is_one_object_on_stderr(shell: Any) -> None:
    done = shell.call("status", "--json", "--coordinator", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (11, "")
    assert len(done.stderr.splitlines()) == 1
    error = json.loads(done.error)["error"]
    assert (error["name"], error["exit_code"]) == ("CoordinatorUnavailableError", 11)
    assert "127.0.0.1:1" in error["message"]
    done = shell.call("doctor", str(shell.folder), "--json")
    assert done.returncode == 23
    assert json.loads(done.error)["error"]["exit_code"] == 23
