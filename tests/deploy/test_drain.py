"""`penstock worker drain` and `penstock run close`, as an operator uses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import streams
from cluster import TOKEN
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import InputFnError, SupersededError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb


def box(coordinator: Any, job: str) -> Appliance:
    address = coordinator.environment["PENSTOCK_COORDINATOR"]
    return Appliance(address, job=job, token=TOKEN, box=0, num_boxes=1, seed=1, timeout_s=60)


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


def test_a_worker_that_is_not_there_is_named(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", "w2")
    assert done.returncode == 18
    assert done.error == "penstock: no worker 'w2' is registered: see `penstock status`"


def test_daemon_option_before_drain_is_refused(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "--coordinator", "127.0.0.1:1", "drain", worker)
    assert done.returncode == 2
    assert "must come after `drain`; before the subcommand it is an option of the daemon" in done.stderr


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


def test_a_slot_that_has_failed_is_told(coordinator: Any, worker: str) -> None:
    address = coordinator.environment["PENSTOCK_COORDINATOR"]
    with (
        CoordinatorClient(address, TOKEN) as client,
        box(coordinator, "failing") as appliance,
    ):
        with pytest.raises(InputFnError):
            list(DataExecutor(DataLoader(streams.raises), appliance=appliance))
        until(lambda: client.status().runs[-1].boxes[0].slots[0].phase == pb.FAILED)
        done = coordinator.call("worker", "drain", worker, "--timeout", "1")
        assert done.returncode == 17
        assert "w1 still runs 1 slots; 1 of these slots have failed, and stay until their" in done.error
    coordinator.call("worker", "drain", worker, "--undo")


@pytest.mark.usefixtures("holding")
def test_waiting_drain_does_not_overrule_undrain(coordinator: Any, worker: str) -> None:
    waiting = coordinator.begin("worker", "drain", worker, "--timeout", "60")
    with CoordinatorClient(coordinator.environment["PENSTOCK_COORDINATOR"], TOKEN) as client:
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
