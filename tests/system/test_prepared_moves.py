"""A migration's target replays while the old runner serves, whatever happens meanwhile: the stream is the undisturbed
one, and the process that has replayed is the one that goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import drawn
import pytest
from census import descendants
from cluster import TOKEN, Cluster, Daemon, running

from penstock.client import DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.rpc.calls import CoordinatorClient

COUNT = 100_000
AFTER = 20
"""Batches of an epoch after the slot has moved."""
MOST = 3_000
"""Batches in which each move must have come: 30 s."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state"), PACED_S="0.01") as cluster:
        cluster.add_worker(1, allow="drawn", name="old")
        cluster.add_worker(1, allow="drawn", name="new")
        yield cluster


class Move:
    """One job whose slot is drained away from its worker, and what happens while the target replays."""

    def __init__(self, cluster: Cluster, job: str, drained_at: int) -> None:
        self.cluster, self.job, self.drained_at = cluster, job, drained_at
        self.old = self.new = cluster.workers[0]
        self.prepared = 0
        """Process of the target that replayed while the old worker had the slot."""
        self.serving: list[int] = []
        """Processes of epochs on the target at the end."""
        self.moved = self.ends = False

    def look(self, client: CoordinatorClient, taken: int, act: Callable[[Move], None]) -> None:
        if taken == self.drained_at:
            name = self._worker(client)
            self.old, self.new = sorted(self.cluster.workers, key=lambda daemon: not epochs_of(daemon))
            client.drain(name)
        elif taken > self.drained_at and not self.prepared:
            found = epochs_of(self.new)
            if found:
                self.prepared = found[0]
                assert epochs_of(self.old), "it serves meanwhile"
                act(self)
        elif self.prepared and not self.moved:
            self.moved = not epochs_of(self.old)

    def _worker(self, client: CoordinatorClient) -> str:
        (run,) = [run for run in client.status().runs if run.run.startswith(f"{self.job}/")]
        return str(run.boxes[0].slots[0].worker)


def epochs_of(daemon: Daemon) -> list[int]:
    found = []
    for pid in descendants(daemon.pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "penstock epoch":
                found.append(pid)
        except OSError:
            continue
    return found


def undisturbed(make: Callable[[int], Any], lengths: list[int], labels: dict[int, int]) -> list[list[int]]:
    """Take so many batches of each epoch. `labels`: see `check`."""
    got = []
    with FakeAppliance(num_workers_per_box=1, seed=5):
        loader = DataLoader(make, COUNT)
        for epoch, length in enumerate(lengths):
            if epoch in labels:
                loader.set_epoch(labels[epoch])
            for batch, _ in zip(loader, range(length), strict=False):
                got.append(batch.tolist())
    return got


def check(
    cluster: Cluster,
    make: Callable[[int], Any],
    act: Callable[[Move], None] = lambda move: None,
    *,
    drained_at: int = 150,
    replay_s: float = 0.3,
    step_s: float = 0.0,
    moves: bool = True,
    labels: dict[int, int] | None = None,
) -> Move:
    """Run a job, drain its worker, let `act` happen while the target replays, and compare.

    labels: epochs for which the loop calls set_epoch(), and the numbers that it gives them. It leaves the epochs before
    after three batches.
    """
    labels = labels or {}
    job = f"{make.__name__}-{act.__name__}-{drained_at}-{os.getpid()}"
    got: list[list[int]] = []
    lengths: list[int] = []
    move = Move(cluster, job, drained_at)
    box = cluster.box(job, num_workers_per_box=1, replay_s=replay_s)
    with box, closing(CoordinatorClient(cluster.address, TOKEN)) as client:
        loader = DataLoader(make, COUNT)
        after = 0
        while after < AFTER:
            epoch = len(lengths)
            if epoch in labels:
                loader.set_epoch(labels[epoch])
            lengths.append(0)
            for batch in loader:
                got.append(batch.tolist())
                lengths[-1] += 1
                time.sleep(step_s)
                move.look(client, len(got), act)
                after += move.moved or (not moves and move.prepared > 0)
                assert len(got) < MOST
                if after >= AFTER or move.ends or (epoch < max(labels, default=0) and lengths[-1] == 3):
                    move.ends = False
                    break
        move.serving = epochs_of(move.new)
        for name in ("old", "new"):
            client.drain(name, undo=True)
    assert got == undisturbed(make, lengths, labels)
    return move


@pytest.mark.parametrize(
    ("drained_at", "replay_s", "step_s"),
    [(150, 0.3, 0.0), (10, float("inf"), 0.0), (30, 0.3, 0.08)],
)
def test_target_goes_on_from_its_replay(cluster: Cluster, drained_at: int, replay_s: float, step_s: float) -> None:
    """Late in an epoch and early, from a snapshot and from the beginning, with a fast loop and a slow one."""
    move = check(cluster, drawn.drawn, drained_at=drained_at, replay_s=replay_s, step_s=step_s)
    assert move.serving == [move.prepared]


def test_target_replays_the_epoch_of_its_number(cluster: Cluster) -> None:
    move = check(cluster, drawn.drawn, drained_at=30, labels={1: 7})
    assert move.serving == [move.prepared]


def test_snapshot_that_lies_is_refuted(cluster: Cluster) -> None:
    move = check(cluster, drawn.liar)
    assert move.prepared not in move.serving


def test_break_while_the_target_replays(cluster: Cluster) -> None:
    def leave(move: Move) -> None:
        move.ends = True

    check(cluster, drawn.drawn, leave)


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_source_dies_while_the_target_replays(cluster: Cluster) -> None:
    def kill(move: Move) -> None:
        os.kill(epochs_of(move.old)[0], signal.SIGKILL)

    check(cluster, drawn.drawn, kill)


def test_target_dies_while_it_replays(cluster: Cluster) -> None:
    def kill(move: Move) -> None:
        os.kill(move.prepared, signal.SIGKILL)

    move = check(cluster, drawn.drawn, kill, moves=False)
    assert not move.moved


def test_coordinator_restarts_while_the_target_replays(cluster: Cluster) -> None:
    def restart(move: Move) -> None:
        cluster.coordinator.kill()
        cluster.restart_coordinator()

    check(cluster, drawn.drawn, restart)
