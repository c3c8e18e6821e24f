"""The module search path of interpreters that run user code: the working directory last, and never one that others can
write to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock.worker.processes.interpreters import interpreter, why_not_searched

PROBE = """
def main():
    import json
    print(hasattr(json, "dumps"))
    try:
        import users_own
    except ModuleNotFoundError:
        print("not found")
    else:
        print(users_own.NAME)
"""


@pytest.fixture
def probe(tmp_path: Path) -> list[str]:
    """The command of an interpreter whose working directory, `tmp_path`/cwd, holds a json.py and a users_own.py."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "probe.py").write_text(PROBE)
    (tmp_path / "cwd").mkdir(mode=0o755)
    (tmp_path / "cwd" / "json.py").write_text("")
    (tmp_path / "cwd" / "users_own.py").write_text("NAME = 'from the working directory'")
    return interpreter("probe")


def said(probe: list[str], tmp_path: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(probe, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_working_directory_is_searched_last(probe: list[str], tmp_path: Path) -> None:
    assert said(probe, tmp_path) == ["True", "from the working directory"]


def test_folder_others_can_write_is_not_searched(
    probe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cwd"
    folder.chmod(0o1777)  # as /tmp is: nobody may remove another's files there, and everybody may add some
    assert said(probe, tmp_path) == ["True", "not found"]
    monkeypatch.chdir(folder)
    assert f"{folder} cannot be imported, because other users can write to it" in why_not_searched()
    folder.chmod(0o775)
    assert why_not_searched() == ""
    if os.getuid() == 0:
        os.chown(folder, 0, 12345)
        assert why_not_searched()
        os.chown(folder, 12345, 0)
        assert why_not_searched()
