"""`penstock worker drain` and `penstock run close`, as an operator uses them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import streams
from appliances import made
from cluster import TOKEN
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import SupersededError
from penstock.proto.rpc.calls import CoordinatorClient


def box(coordinator: Any, job: str) -> Appliance:
    address = coordinator.environment["PENSTOCK_COORDINATOR"]
    return made(address, job=job, token=TOKEN, box=0, num_boxes=1, seed=1, timeout_s=60)


@pytest.fixture(scope="module")
def worker(coordinator: Any) -> str:
    coordinator.start("worker", "--slots", "1", "--allow", "streams", "--name", "w1")
    return "w1"


def test_idle_worker_is_drained_and_undrained(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", worker)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == "worker w1 is drained: it has no slots and gets none; stop it, or withdraw the drain with --undo\n"
    )
    found = json.loads(coordinator.call("status", "--json").stdout)
    assert [(w["worker"], w["draining"]) for w in found["workers"]] == [("w1", True)]
    done = coordinator.call("worker", "drain", worker, "--undo")
    assert (done.returncode, done.stdout) == (0, "worker w1 takes slots again; it has 0\n")


@pytest.fixture
def holding(coordinator: Any, worker: str) -> Iterator[None]:
    """A job has the worker's one slot, and nobody else has a place for it."""
    with box(coordinator, "holding") as appliance:
        for _ in DataExecutor(DataLoader(streams.counter, 1000), num_steps=1000, appliance=appliance):
            yield
            break
    coordinator.call("worker", "drain", worker, "--undo")


@pytest.mark.usefixtures("holding")
def test_slot_without_free_capacity_ends_the_wait(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", worker, "--timeout", "1", "--json")
    assert (done.returncode, done.stdout) == (17, "")
    assert "still runs 1 slots; no other worker has free capacity for 1 of these slots" in done.error
    done = coordinator.call("worker", "drain", worker, "--timeout", "0")
    assert done.returncode == 0
    assert done.stdout.startswith(
        "worker w1 still runs 1 slots; no other worker has free capacity for 1 of these slots"
    )


@pytest.mark.usefixtures("holding")
def test_waiting_drain_does_not_overrule_undrain(coordinator: Any, worker: str) -> None:
    waiting = coordinator.begin("worker", "drain", worker, "--timeout", "60")
    with CoordinatorClient(coordinator.environment["PENSTOCK_COORDINATOR"], TOKEN, insecure=True) as client:
        until(lambda: client.status().workers[0].draining)
        client.drain(worker, undo=True)
        assert waiting.process.wait(60) == 18
        assert "takes slots again, because another command ended the drain (--undo)" in waiting.log.read_text()
        assert not client.status().workers[0].draining


def test_training_job_that_reads_gets_the_reason(coordinator: Any, worker: str) -> None:
    with box(coordinator, "hung") as appliance:
        batches = iter(DataExecutor(DataLoader(streams.counter, 100_000), num_steps=100_000, appliance=appliance))
        next(batches)
        done = coordinator.call("run", "close", "hung")
        assert (done.returncode, done.stdout) == (0, "run hung/0 is closed: attempt 1 was ended\n")
        with pytest.raises(SupersededError, match="was ended by an operator"):
            for _ in batches:
                pass
    done = coordinator.call("run", "close", "hung/0", "--json")
    assert json.loads(done.stdout) == [{"run": "hung/0", "attempt": 1, "was_open": False}]
    with box(coordinator, "hung") as appliance:
        assert len(list(DataExecutor(DataLoader(streams.counter, 3), num_steps=3, appliance=appliance))) == 3


def test_a_drain_ordered_while_the_coordinator_restarts(coordinator: Any, worker: str) -> None:
    first, address = coordinator.started[0], coordinator.environment["PENSTOCK_COORDINATOR"]
    assert first.stop() == 0
    ordered = coordinator.begin("worker", "drain", worker)
    time.sleep(1.0)  # it finds nobody
    assert ordered.process.poll() is None
    coordinator.start("coordinator", "--listen", address, "--state-dir", "state")
    assert ordered.process.wait(60) == 0, ordered.log.read_text()
    with CoordinatorClient(address, TOKEN, insecure=True) as client:
        assert client.status().workers[0].draining
