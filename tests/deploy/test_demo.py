"""`penstock demo`, as someone runs it who has installed Penstock and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def test_the_demo_shows_equal_streams_and_leaves_nothing(shell: Any, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    done = shell.run(
        *("demo", "--json"),
        deadline_s=110,
        TMPDIR=str(place),
        PYTHONPATH=None,
        PENSTOCK_COORDINATOR="another:7070",  # of an installation that is not the demo's business
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["same"] == found["steps"] == 120
    assert found["digest"] == found["digest_resumed"]
    assert found["recoveries"] >= 1
    assert found["killed"]["worker"].startswith("demo-")
    assert [path.name for path in place.rglob("*")] in ([], [f"penstock-{os.getuid()}"])  # where runners have a place
