"""`penstock demo`, as someone runs it who has installed Penstock and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_demo_shows_equal_streams_and_cleans_up(shell: Any, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    done = shell.run(
        "demo",
        deadline_s=110,
        TMPDIR=str(place),
        PYTHONPATH=None,
        PENSTOCK_COORDINATOR="another:7070",  # of an installation that is not the demo's business
    )
    assert done.returncode == 0, done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "BAD"))]
    assert results[0] == "ok  120 of 120 steps are the same batches"
    assert results[1] == "ok  killed and resumed, the whole stream has the same digest"
    assert results[2].startswith("ok  worker demo-")
    assert list(place.iterdir()) == []
