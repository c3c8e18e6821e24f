"""The last words of a daemon's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy.engines.keeper import log_end


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
