"""The command itself: help, exit codes, one line for an error, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import typer
import typer.main

from penstock.deploy.cli.main import app
from penstock.deploy.console import exit_codes
from penstock.deploy.console.exit_codes import CODES, CommandError, exit_code, guarded
from penstock.proto.errors import CATALOGUE, PenstockError, StateUnavailableError

COMMANDS = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_no_command_is_a_usage_error_with_help(shell: Any) -> None:
    done = shell.run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
    assert CODES[-1].meaning not in done.stdout
    assert shell.run("--exit-codes").stdout.splitlines() == [f"{code.number:>3}  {code.meaning}" for code in CODES]
    assert shell.call().returncode == 2
    assert shell.call("no-such-command").returncode == 2


LIGHT = (
    "cli.main",
    *(f"console.{name}" for name in ("command_token", "settings", "peer")),
    *(f"operations.{name}" for name in ("run_daemon", "show_status", "show_state", "state_values")),
    *(f"operations.{name}" for name in ("watch_status", "list_settings", "checkpoint_folders")),
    "demo.run_demo",
    *(f"doctor.{name}" for name in ("loader_check", "loader_report", "findings")),
    *(f"doctor.{name}" for name in ("machine_check", "cluster_check")),
    *(f"replay.{name}" for name in ("replay_batch", "replay_report", "stream_replay")),
    *(f"engines.{name}" for name in ("up_down", "supervisor", "local", "ray")),
)


def test_torch_is_imported_only_when_needed() -> None:
    """Import all in one process: what one of them does not load, they do not together."""
    modules = [
        *(f"penstock.deploy.{name}" for name in LIGHT),
        "penstock.appliance.server.server",
        "penstock.worker.daemon.daemon",
    ]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    if "torch" in sys.modules or "numpy" in sys.modules and module.startswith("penstock.deploy."):
        sys.exit(f"{{module}} imports it")
import penstock.client
if found := [name for name in sys.modules if name.startswith("prometheus")]:
    sys.exit(f"{{found}} are for those who ask for metrics")
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_error_has_one_exit_code() -> None:
    named = [name for code in CODES for name in code.errors.split()]
    assert sorted(named) == sorted(CATALOGUE)
    assert len({code.number for code in CODES}) == len(CODES)
    for entry in CATALOGUE.values():
        assert exit_code(entry.error("x")) not in (0, 1)


def code_of(error: BaseException | None) -> int:
    def command() -> None:
        if error is not None:
            raise error

    with pytest.raises(typer.Exit) as ended:
        guarded(command)()
    return ended.value.exit_code


def test_penstock_error_is_one_line_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(StateUnavailableError("no step 7:\n steps 8 to 9", remote_traceback="Traceback: far away")) == 20
    assert capsys.readouterr().err == "penstock: no step 7: steps 8 to 9\n"


def test_debug_shows_local_and_remote_tracebacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_codes, "_debug", True)
    assert code_of(PenstockError("it broke", remote_traceback="Traceback: far away")) == 10
    shown = capsys.readouterr().err
    assert "in command" in shown
    assert "Traceback: far away" in shown
    assert shown.endswith("penstock: it broke\n")


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(None) == 0
    assert code_of(CommandError("not here", 16)) == 16
    assert capsys.readouterr().err == "penstock: not here\n"
    assert code_of(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback() -> None:
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(command)()


def test_ctrl_c_is_quiet(shell: Any) -> None:
    """`status` at an address that never answers: a listener whose backlog takes the connection and says nothing."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = shell.begin("status", "--coordinator", f"127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(60)
        connection, _ = listener.accept()  # it is waiting for an answer now
        with connection:
            assert command.stop(signal.SIGINT) == 130
    assert command.log.read_text() == ""


@pytest.mark.parametrize(
    ("redirected", "code", "says"),
    [
        ("config > /dev/full", 10, "standard output cannot be written: No space left on device"),
        ("state $'\\xff'", 2, "an argument must be valid UTF-8, got \\udcff"),
    ],
)
def test_what_cannot_be_said_or_read_is_one_line(shell: Any, redirected: str, code: int, says: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m penstock.deploy {redirected}"],
        env=shell.env({}),
        cwd=shell.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.splitlines()[:-1]) == (code, [])
    assert says in done.stderr


def test_json_error_is_one_object_on_stderr(shell: Any) -> None:
    done = shell.call("status", "--json", "--coordinator", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (11, "")
    assert len(done.stderr.splitlines()) == 1
    error = json.loads(done.error)["error"]
    assert (error["name"], error["exit_code"]) == ("CoordinatorUnavailableError", 11)
    assert "127.0.0.1:1" in error["message"]
    done = shell.call("checkpoint", "verify", str(shell.folder), "--json")
    assert done.returncode == 23
    assert json.loads(done.error)["error"]["exit_code"] == 23
