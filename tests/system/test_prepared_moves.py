"""A migration's target replays while the old runner serves: the stream is the undisturbed one, and the process that has
replayed is the one that goes on. What happens meanwhile is in tests/model and tests/appliance/test_migration.py."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import drawn
from census import descendants
from cluster import TOKEN, Daemon, running

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.rpc.calls import CoordinatorClient

COUNT = 100_000
DRAINED_AT, AFTER = 150, 20
"""Batches before the worker is drained, and after the slot has moved."""
MOST = 3_000
"""Batches in which the move must have come: 30 s."""


def epochs_of(daemon: Daemon) -> list[int]:
    found = []
    for pid in descendants(daemon.pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "penstock-epoch":
                found.append(pid)
        except OSError:
            continue
    return found


def test_target_goes_on_from_its_replay(tmp_path: Path) -> None:
    got: list[list[int]] = []
    prepared: list[int] = []
    after = 0
    with running(tmp_path / "state", PACED_S="0.01") as cluster:
        workers = {name: cluster.add_worker(1, allow="drawn", name=name) for name in ("one", "other")}
        box = cluster.box("moves", num_workers_per_box=1, replay_s=0.3)
        with box as appliance, closing(CoordinatorClient(cluster.address, TOKEN, insecure=True)) as client:
            for batch in DataExecutor(DataLoader(drawn.drawn, COUNT), appliance=appliance):
                got.append(batch.tolist())
                if len(got) == DRAINED_AT:
                    (run,) = client.status().runs
                    name = run.boxes[0].slots[0].worker
                    old = workers.pop(name)
                    (new,) = workers.values()
                    client.drain(name)
                elif len(got) > DRAINED_AT and not prepared:
                    prepared = epochs_of(new)
                    assert not prepared or epochs_of(old), "it serves meanwhile"
                elif prepared:
                    after += not epochs_of(old)
                assert len(got) < MOST
                if after == AFTER:
                    assert epochs_of(new) == prepared
                    break
    with FakeAppliance(num_workers_per_box=1, seed=5):
        undisturbed = zip(DataLoader(drawn.drawn, COUNT), range(len(got)), strict=False)
        assert got == [batch.tolist() for batch, _ in undisturbed]
