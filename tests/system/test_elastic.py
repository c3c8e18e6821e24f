"""Workers join and leave a job that runs: its slots move in good order, and its stream is what it would have been."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paced
import pytest
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.calls import CoordinatorClient
from penstock.proto.errors import UnknownWorkerError
from penstock.proto.v1 import coordinator_pb2 as pb

COUNT = 100_000
"""Batches of a worker's pass: more than any test takes."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, options=["--balance-after-s", "1"]) as cluster:
        yield cluster


class Watched:
    """A training loop, and what the coordinator says of it between its steps."""

    def __init__(self, cluster: Cluster, workers: int, *, always_ready: bool = True) -> None:
        self.cluster = cluster
        self.workers = workers
        self.always_ready = always_ready
        self.step = 0

    def run(
        self, until: Callable[[dict[int, pb.SlotView]], bool], act: Callable[[int], None] = lambda step: None
    ) -> None:
        """Take steps until the slots are as wished, each compared with what it must be. `always_ready`: no slot is ever
        without a worker that has it ready."""
        with CoordinatorClient(self.cluster.address, TOKEN) as client, self.appliance() as appliance:
            executor = DataExecutor(DataLoader(paced.paced, COUNT), num_steps=COUNT, appliance=appliance)
            for batch in executor:
                self.step = executor.step
                turn, taken = (self.step - 1) % self.workers, (self.step - 1) // self.workers + 1
                assert batch.tolist() == [turn, taken]
                act(self.step)
                if self.step % 10 == 0:
                    slots = {slot.slot: slot for slot in client.status().runs[0].boxes[0].slots}
                    assert not self.always_ready or all(slot.phase == pb.READY for slot in slots.values())
                    if until(slots):
                        return

    def appliance(self) -> Appliance:
        return Appliance(
            self.cluster.address,
            num_workers_per_box=self.workers,
            job="elastic",
            seed=3,
            token=TOKEN,
            timeout_s=60,
            box=0,
            num_boxes=1,
        )


def on(slots: dict[int, pb.SlotView]) -> list[str]:
    return sorted(slot.worker for slot in slots.values())


def drain(cluster: Cluster, worker: str, **order: Any) -> pb.DrainWorkerReply:
    with CoordinatorClient(cluster.address, TOKEN) as client:
        return client.drain(worker, **order)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """What moves in good order is nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_drained_worker_hands_its_slots_over_while_the_loop_goes_on(cluster: Cluster) -> None:
    cluster.add_worker(2, allow="paced", name="old")
    told: list[pb.DrainWorkerReply] = []

    def act(step: int) -> None:
        if step == 50:
            told.append(drain(cluster, "old"))
            cluster.add_worker(2, allow="paced", name="new")

    watched = Watched(cluster, 2)
    watched.run(lambda slots: on(slots) == ["new", "new"], act)
    assert (told[0].slots, told[0].stuck) == (2, 2)  # there was no other worker then
    left = drain(cluster, "old")
    assert (left.slots, left.stuck) == (0, 0)


def test_a_worker_that_is_told_to_end_hands_over_first(cluster: Cluster) -> None:
    old = cluster.add_worker(2, "--drain-s", "60", allow="paced", name="old")
    cluster.add_worker(2, allow="paced", name="other")

    def act(step: int) -> None:
        if step == 50:
            old.send_signal(signal.SIGTERM)

    Watched(cluster, 2).run(lambda slots: "old" not in on(slots), act)
    assert old.wait(30) == 0


def test_a_worker_told_to_end_that_nobody_can_relieve_ends_at_once(cluster: Cluster) -> None:
    old = cluster.add_worker(2, "--drain-s", "600", allow="paced", name="old")

    def act(step: int) -> None:
        if step == 50:
            old.send_signal(signal.SIGTERM)
            assert old.wait(30) == 0
            cluster.add_worker(2, allow="paced", name="new")

    watched = Watched(cluster, 2, always_ready=False)
    with pytest.warns(UserWarning, match="drains"):  # for it stood still meanwhile
        # Beyond what the old one had made ahead, which comes first.
        watched.run(lambda slots: on(slots) == ["new", "new"] and watched.step > 400, act)


def test_slots_go_to_workers_that_join(cluster: Cluster) -> None:
    cluster.add_worker(4, allow="paced", name="first")

    def act(step: int) -> None:
        if step == 40:
            cluster.add_worker(4, allow="paced", name="second")

    Watched(cluster, 4).run(lambda slots: on(slots) == ["first", "first", "second", "second"], act)


def test_a_slot_goes_away_from_a_worker_that_the_loop_waits_for(cluster: Cluster) -> None:
    cluster.environment["PACED_S"] = "0.02"
    cluster.add_worker(1, allow="paced", name="slow")
    cluster.environment["PACED_S"] = "0.001"
    cluster.add_worker(1, allow="paced", name="fast")

    def act(step: int) -> None:
        if step == 40:
            cluster.add_worker(1, allow="paced", name="spare")

    Watched(cluster, 2).run(lambda slots: on(slots) == ["fast", "spare"], act)


def test_an_order_is_taken_back_and_a_worker_that_is_not_there_is_named(cluster: Cluster) -> None:
    cluster.add_worker(2, allow="paced", name="only")

    def act(step: int) -> None:
        if step == 20:
            assert drain(cluster, "only").stuck == 2
        elif step == 60:
            drain(cluster, "only", undo=True)

    def taken_back(slots: dict[int, pb.SlotView]) -> bool:
        with CoordinatorClient(cluster.address, TOKEN) as client:
            (worker,) = client.status().workers
            return watched.step > 60 and not worker.draining

    watched = Watched(cluster, 2)
    watched.run(taken_back, act)
    with pytest.raises(UnknownWorkerError, match="there is no worker 'other'; there are: only"):
        drain(cluster, "other")


def test_a_drain_outlives_the_coordinator(cluster: Cluster) -> None:
    cluster.add_worker(2, allow="paced", name="old")

    def act(step: int) -> None:
        if step == 20:
            drain(cluster, "old")
        elif step == 60:
            cluster.coordinator.kill()
            cluster.restart_coordinator()
            cluster.add_worker(2, allow="paced", name="new")

    Watched(cluster, 2).run(lambda slots: on(slots) == ["new", "new"], act)
