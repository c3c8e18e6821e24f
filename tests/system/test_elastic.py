"""Workers join and leave a job that runs: its slots move in good order, and its stream is what it would have been."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import paced
import pytest
from census import descendants
from cluster import TOKEN, Cluster, Daemon, running
from waiting import PATIENCE

from penstock.client import DataExecutor, DataLoader
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

COUNT = 100_000
"""Batches of a worker's pass: more than any test takes."""
JOBS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with one worker, which does the normal work of a worker besides what a test is about."""
    with running(tmp_path_factory.mktemp("state"), options=["--balance-after-s", "1"]) as cluster:
        cluster.add_worker(4, allow="paced", name="kept")
        yield cluster


def paced_worker(
    cluster: Cluster, slots: int, *more: str, name: str, batch_s: float = 0
) -> AbstractContextManager[Daemon]:
    """Return a context in which another worker has joined; it leaves at the end of the block."""
    cluster.environment["PACED_S"] = str(batch_s)
    return cluster.joined(slots, *more, allow="paced", name=name)


class Watched:
    """A training loop, and what the coordinator says of it between its steps."""

    def __init__(self, cluster: Cluster, workers: int, *, always_ready: bool = True, step_s: float = 0.002) -> None:
        """`step_s`: seconds of a step. A loop at full speed would cost a core for as long as a slot takes to move."""
        self.cluster = cluster
        self.workers = workers
        self.step_s = step_s
        self.job = f"elastic-{next(JOBS)}"
        self.always_ready = always_ready
        self.step = 0

    def run(
        self, until: Callable[[dict[int, pb.SlotView]], bool], act: Callable[[int], None] = lambda step: None
    ) -> None:
        """Take steps until the slots are as wished, each compared with what it must be. `always_ready`: no slot is ever
        without a worker that has it ready."""
        box = self.cluster.box(self.job, num_workers_per_box=self.workers)
        with CoordinatorClient(self.cluster.address, TOKEN, insecure=True) as client, box as appliance:
            executor = DataExecutor(DataLoader(paced.paced, COUNT), num_steps=COUNT, appliance=appliance)
            for batch in executor:
                self.step = executor.step
                turn, taken = (self.step - 1) % self.workers, (self.step - 1) // self.workers + 1
                assert batch.tolist() == [turn, taken]
                time.sleep(self.step_s)
                act(self.step)
                if self.step % 10 == 0:
                    (run,) = [run for run in client.status().runs if run.run.startswith(f"{self.job}/")]
                    slots = {slot.slot: slot for slot in run.boxes[0].slots}
                    assert not self.always_ready or all(slot.phase == pb.READY for slot in slots.values())
                    if until(slots):
                        return


def on(slots: dict[int, pb.SlotView]) -> list[str]:
    return sorted(slot.worker for slot in slots.values())


def drain(cluster: Cluster, worker: str, **order: Any) -> pb.DrainWorkerReply:
    with CoordinatorClient(cluster.address, TOKEN, insecure=True) as client:
        return client.drain(worker, **order)


@contextmanager
def aside(cluster: Cluster) -> Iterator[None]:
    """The kept worker drains: it has no room for what is new."""
    drain(cluster, "kept")
    try:
        yield
    finally:
        back(cluster)


def back(cluster: Cluster) -> None:
    drain(cluster, "kept", undo=True)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Turn warnings into errors: an orderly migration gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_drained_worker_migrates_during_training(cluster: Cluster) -> None:
    """The coordinator is killed and started again while the worker drains."""
    told: list[pb.DrainWorkerReply] = []
    with ExitStack() as closing:

        def act(step: int) -> None:
            if step == 20:
                told.append(drain(cluster, "kept"))
                closing.callback(back, cluster)
            elif step == 60:
                cluster.coordinator.kill()
                cluster.restart_coordinator()
                closing.enter_context(paced_worker(cluster, 2, name="new"))

        Watched(cluster, 2).run(lambda slots: on(slots) == ["new", "new"], act)
        assert (told[0].slots, told[0].stuck) == (2, 2)  # there was no other worker then
        left = drain(cluster, "kept")
        assert (left.slots, left.stuck) == (0, 0)


def test_ending_worker_migrates_its_slots_first(cluster: Cluster) -> None:
    with paced_worker(cluster, 2, "--drain-s", "60", name="old") as old, ExitStack() as closing:
        closing.enter_context(aside(cluster))

        def act(step: int) -> None:
            if step == 50:
                closing.close()
                old.send_signal(signal.SIGTERM)

        Watched(cluster, 2).run(lambda slots: on(slots) == ["kept", "kept"], act)
        assert old.wait(30) == 0


def test_unrelieved_ending_worker_answers_states_for_its_drain_seconds(cluster: Cluster) -> None:
    """All processes of the only worker with room get SIGTERM, again and again, as from Slurm's scripts; its job, which
    has got it too, still takes steps, saves and ends. Then the worker ends, long before the time is over."""
    with paced_worker(cluster, 2, "--drain-s", "600", name="old") as old, aside(cluster):
        box = cluster.box("unrelieved", num_workers_per_box=2)
        with box as appliance:
            loader = DataLoader(paced.paced, COUNT)
            executor = DataExecutor(loader, num_steps=COUNT, appliance=appliance)
            for batch in executor:
                expected, step = batch.tolist(), executor.step
                time.sleep(0.002)
                if 50 <= step < 60:
                    for pid in [old.pid, *descendants(old.pid)]:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGTERM)
                if step == 500:  # beyond what the runners had made before the signals
                    saved = loader.state_dict()
                    assert old.poll() is None
                    break
        assert old.wait(PATIENCE * 30) == 0
    again = DataLoader(paced.paced, COUNT)
    again.load_state_dict(saved)
    with cluster.box("unrelieved", num_workers_per_box=2) as appliance:
        after = next(iter(DataExecutor(again, appliance=appliance)))
    assert (expected, after.tolist()) == ([1, 250], [0, 251])


def test_the_second_interrupt_ends_a_worker_at_once(cluster: Cluster) -> None:
    with paced_worker(cluster, 2, "--drain-s", "600", name="old") as old, aside(cluster):

        def act(step: int) -> None:
            if step == 50:
                old.send_signal(signal.SIGTERM)
                old.send_signal(signal.SIGINT)
                assert old.wait(PATIENCE * 30) == 0

        Watched(cluster, 2, always_ready=False).run(lambda slots: old.poll() is not None, act)


def test_slots_go_to_workers_that_join(cluster: Cluster) -> None:
    with ExitStack() as closing:

        def act(step: int) -> None:
            if step == 40:
                closing.enter_context(paced_worker(cluster, 4, name="second"))

        Watched(cluster, 4).run(lambda slots: on(slots) == ["kept", "kept", "second", "second"], act)
