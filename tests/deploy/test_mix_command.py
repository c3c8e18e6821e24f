"""`penstock mix`, as an operator uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mixed
import pytest
from appliances import made
from cluster import TOKEN

from penstock.client import DataExecutor, DataLoader


@pytest.fixture(scope="module")
def address(coordinator: Any) -> str:
    coordinator.start("worker", "--slots", "4", "--allow", "mixed", "--name", "w1")
    return str(coordinator.environment["PENSTOCK_COORDINATOR"])


@pytest.fixture(scope="module")
def batches(address: str) -> Iterator[Any]:
    """A job after its fifth step, which can be changed from step 6 on."""
    settings: dict[str, Any] = {"token": TOKEN, "box": 0, "num_boxes": 1, "num_workers_per_box": 2, "timeout_s": 60}
    with made(address, job="mixing", seed=1, **settings) as appliance:
        found = iter(DataExecutor(DataLoader(mixed.train), num_steps=30, appliance=appliance))
        for _ in range(5):
            next(found)
        yield found


@pytest.mark.usefixtures("batches")
def test_dry_run_shows_and_changes_nothing(coordinator: Any) -> None:
    asked = ("mix", "mixing", "--from-step", "9", "--weights", "web=0.5,code=0.5")
    done = coordinator.call(*asked, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "The mixture of run mixing/0 would change from step 9 on (sample 64)",
        "source  share before  share after",
        "web           75.00%       50.00%",
        "code          25.00%       50.00%",
    ]
    assert lines[-1].startswith("2 slots would restart; ")
    assert not json.loads(coordinator.call(*asked, "--dry-run", "--json").stdout)["changed"]


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["mixing", "--from-step", "3", "--weights", "web=1,code=1"], 2, "--from-step must be at least 6"),
        (["mixing", "--from-step", "9", "--weights", "web=1,cod=1"], 2, "must be one of web, code, got 'cod'"),
        (["nowhere", "--from-step", "9", "--retire", "web"], 18, "has no run or job 'nowhere'"),
    ],
)
def test_refusals_are_one_line(coordinator: Any, arguments: list[str], code: int, says: str) -> None:
    done = coordinator.call("mix", *arguments)
    assert says in done.error
    assert done.returncode == code
    assert done.stdout == ""


def test_change_is_made_and_replayed(coordinator: Any, batches: Any, tmp_path: Path) -> None:
    asked = ("mix", "mixing/0", "--from-step", "8", "--weights", "web=1,code=1,math=2", "--add", "math=mixed:math")
    done = coordinator.call(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "changes from step 8 on (sample 56)" in done.stdout
    rows = [batch.tolist() for batch in batches]
    expected = mixed.train({0: {"web": 3, "code": 1}, 7: {"web": 1, "code": 1, "math": 2}}, more=True)
    assert rows == [batch.tolist() for batch, _ in zip(expected, range(30), strict=False)][5:]
    events = json.loads(coordinator.call("status", "--json").stdout)["events"]
    assert any("the mixture changes from step 8 on" in event["text"] for event in events)
    out = ("--json", "--out", str(tmp_path / "8.pst"))
    done = coordinator.call("replay", "mixing", "--step", "8", "--allow", "mixed", *out)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"], found["verification"]
