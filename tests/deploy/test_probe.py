"""`python -m penstock.deploy.probe`: what it says of daemons that are well, that hang, and that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.deploy.probe import main
from penstock.runtime.process.liveness_file import LivenessWriter, read_liveness


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_WORKER_LIVENESS_FILE", "PENSTOCK_COORDINATOR_LISTEN"):
        monkeypatch.delenv(name, raising=False)


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The monotonic clock stands there."""
    monkeypatch.setattr(time, "monotonic", lambda: seconds)


def test_liveness_file_writes_through_no_link(tmp_path: Path) -> None:
    """The name beside it was made of the process's number, which every user knows."""
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    (tmp_path / f".pulse.{os.getpid()}").symlink_to(victim)
    LivenessWriter(str(tmp_path / "pulse")).note_answer()
    assert victim.read_text() == "years of work"
    assert read_liveness(str(tmp_path / "pulse")).heard_s_ago < 60


def test_worker_without_coordinator_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pulse"
    monkeypatch.setenv("PENSTOCK_WORKER_LIVENESS_FILE", str(file))
    at(monkeypatch, 1000.0)
    liveness = LivenessWriter(str(file))
    liveness.turned()
    assert (main(["worker", "live"]), main(["worker", "ready"])) == (0, 1)
    assert "the coordinator has not answered the worker yet" in capsys.readouterr().err
    liveness.note_answer()
    assert (main(["worker", "live"]), main(["worker", "ready"])) == (0, 0)
    at(monkeypatch, 1050.0)  # the coordinator went away, and rounds go on
    liveness.turned()
    assert (main(["worker", "live"]), main(["worker", "ready"])) == (0, 1)
    assert "the coordinator has not answered the worker for 50 s" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pulse"]


def test_worker_stuck_in_a_round_is_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pulse"
    monkeypatch.setenv("PENSTOCK_WORKER_LIVENESS_FILE", str(file))
    at(monkeypatch, 1000.0)
    LivenessWriter(str(file)).note_answer()
    at(monkeypatch, 1121.0)
    assert main(["worker", "live"]) == 1
    assert "the worker has made no progress for 121 s" in capsys.readouterr().err


def test_it_is_quick_to_start() -> None:
    code = "import penstock.deploy.probe, sys; print(sorted({'torch', 'typer', 'pydantic', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
