"""`penstock run close`, as an operator uses it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import streams

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import SupersededError

TOKEN = "a-token-for-tests-only-0123456789"


@pytest.fixture(scope="module")
def address(coordinator: Any) -> str:
    coordinator.start("worker", "--slots", "1", "--allow", "streams", "--name", "w1")
    return str(coordinator.environment["PENSTOCK_COORDINATOR"])


def test_training_job_that_reads_gets_the_reason(coordinator: Any, address: str) -> None:
    with Appliance(address, job="hung", token=TOKEN, box=0, num_boxes=1, seed=1, timeout_s=60) as appliance:
        batches = iter(DataExecutor(DataLoader(streams.counter, 100_000), num_steps=100_000, appliance=appliance))
        next(batches)
        done = coordinator.call("run", "close", "hung")
        assert (done.returncode, done.stdout) == (0, "run hung/0 is closed: attempt 1 was ended\n")
        with pytest.raises(SupersededError, match="was ended by an operator"):
            for _ in batches:
                pass
    done = coordinator.call("run", "close", "hung/0", "--json")
    assert json.loads(done.stdout) == [{"run": "hung/0", "attempt": 1, "was_open": False}]
    with Appliance(address, job="hung", token=TOKEN, box=0, num_boxes=1, seed=1, timeout_s=60) as appliance:
        assert len(list(DataExecutor(DataLoader(streams.counter, 3), num_steps=3, appliance=appliance))) == 3


def test_run_that_is_not_there_is_named(coordinator: Any, address: str) -> None:
    done = coordinator.call("run", "close", "nowhere")
    assert done.returncode == 18
    assert "has no run or job 'nowhere'" in done.error
