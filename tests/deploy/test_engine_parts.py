"""Parts that engines share: external commands, and the last words of a daemon's log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.deploy.console.exit_codes import CommandError
from penstock.deploy.engines.external_commands import called
from penstock.deploy.engines.keeper import log_end
from penstock.proto.errors import DeadlineError, PenstockError


def test_output_of_a_command_is_returned() -> None:
    assert called([sys.executable, "-Sc", "print(input()[::-1])"], stdin="secret\n") == "terces\n"


@pytest.mark.parametrize(
    ("command", "deadline_s", "error", "says"),
    [
        (["no-such-command"], 60.0, CommandError, "no-such-command must be installed here"),
        ([sys.executable, "-Sc", "raise SystemExit('full')"], 60.0, PenstockError, "failed with status 1: full$"),
        ([sys.executable, "-Sc", "import time; time.sleep(60)"], 0.2, DeadlineError, "did not answer within 0.2 s"),
    ],
    ids=["missing", "failed", "late"],
)
def test_command_without_result_is_an_error(
    command: list[str], deadline_s: float, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        called(command, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "its log is empty (LOG)"),
        ("started\npenstock: port 1 is in use\n", "port 1 is in use (LOG)"),
        ("a\n\nb\nc\n", "b | c (LOG)"),
        (None, "its log LOG cannot be read: No such file or directory"),
    ],
)
def test_end_of_a_log(tmp_path: Path, log: str | None, words: str) -> None:
    path = tmp_path / "log"
    if log is not None:
        path.write_text(log)
    assert log_end(path, 2) == words.replace("LOG", str(path))
