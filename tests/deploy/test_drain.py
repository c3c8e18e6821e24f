"""`penstock worker drain`, as an operator uses it."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture(scope="module")
def worker(coordinator: Any) -> str:
    coordinator.start("worker", "--slots", "1", "--allow", "streams", "--name", "w1")
    return "w1"


def test_a_worker_without_slots_is_drained_at_once_and_taken_back(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", worker)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "worker w1 is drained: it has no slots and gets none; stop it, or take it back with --undo\n"
    found = json.loads(coordinator.call("status", "--json").stdout)
    assert [(w["worker"], w["draining"]) for w in found["workers"]] == [("w1", True)]
    done = coordinator.call("worker", "drain", worker, "--undo")
    assert (done.returncode, done.stdout) == (0, "worker w1 takes slots again; it has 0\n")


def test_json_says_how_far_it_is(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", worker, "--json", "--timeout", "0")
    assert json.loads(done.stdout) == {"worker": "w1", "draining": True, "slots": 0, "stuck": 0}
    coordinator.call("worker", "drain", worker, "--undo")


def test_a_worker_that_is_not_there_is_named(coordinator: Any, worker: str) -> None:
    done = coordinator.call("worker", "drain", "w2")
    assert done.returncode == 18
    assert done.error == "penstock: there is no worker 'w2'; there are: w1"


def test_only_operators_may_drain(coordinator: Any, worker: str, tmp_path: Any) -> None:
    done = coordinator.call("worker", "drain", worker, PENSTOCK_TOKEN="worker:another-token-0123456789")
    assert done.returncode == 12


def test_help_tells_the_daemon_from_the_order(coordinator: Any) -> None:
    daemon, order = coordinator.call("worker", "--help").stdout, coordinator.call("worker", "drain", "--help").stdout
    assert "--slots" in daemon
    assert "drain" in daemon
    assert "--undo" in order
    assert "--slots" not in order
