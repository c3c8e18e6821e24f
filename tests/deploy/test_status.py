"""`penstock status` and `penstock state`, on an idle coordinator and on a real run: trainer, workers, two loaders."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import streams
from appliances import made
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.deploy.operations.show_state import as_dict as state_dict
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb

STEPS = 7


def test_state_of_no_run(coordinator: Any) -> None:
    done = coordinator.call("state", "nobody")
    assert done.returncode == 18
    assert done.error.startswith("penstock: the coordinator has no run 'nobody/0': see `penstock status --all`")
    assert len(done.stderr.splitlines()) == 1
    assert coordinator.call("state", "nobody/first").returncode == 2
    assert coordinator.call("state", "nobody", "--step", "-1").returncode == 2


class Running:
    """A run that stands at STEPS, and the shell of its coordinator."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell

    def json(self, *arguments: str) -> Any:
        done = self.shell.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def running(coordinator: Any) -> Iterator[Running]:
    coordinator.start("worker", "--slots", "4", "--allow", "streams", "--name", "w1")
    shell = coordinator.environment
    address, token = shell["PENSTOCK_COORDINATOR"], shell["PENSTOCK_TOKEN"]
    with made(address, token=token, job="job", num_workers_per_box=2, seed=5, timeout_s=60) as appliance:
        executor = DataExecutor(DataLoader(streams.shared, 100), num_steps=50, appliance=appliance)
        steps = iter(executor)
        for _ in range(STEPS):
            next(steps)
        yield Running(coordinator)
        del steps


def test_status_of_a_run(running: Running) -> None:
    until(lambda: running.json("status")["runs"][0]["boxes"][0]["step"] == STEPS)
    found = running.json("status")
    (run,), (worker,) = found["runs"], found["workers"]
    (box,) = run["boxes"]
    assert (run["run"], run["attempt"], run["open"], run["input_fn"]) == ("job/0", 1, True, "streams:shared")
    assert (box["box"], box["live"], box["epoch"], box["epoch_ended"]) == (0, True, 0, False)
    assert 0 <= box["waited_share"] <= 1
    slots = [(slot["slot"], slot["worker"], slot["phase"], slot["error"]) for slot in box["slots"]]
    assert slots == [(0, "w1", "READY", None), (1, "w1", "READY", None)]
    assert "ticket" not in json.dumps(found)
    assert [run["run"] for run in running.json("status", "job")["runs"]] == ["job/0"]
    assert running.shell.call("status", "other").returncode == 18
    opened = [event["text"] for event in found["events"] if event["kind"] == "box opened"]
    assert opened == [f"box 0 of 1 box x 2 workers is in attempt 1, from host {socket.gethostname()}"]
    assert (worker["worker"], worker["slots"], worker["slots_used"], worker["live"]) == ("w1", 4, 2, True)


def test_state_at_a_step(running: Running) -> None:
    found = running.json("state", "job", "--step", "5")
    assert (found["run"], found["step"], found["num_boxes"], found["num_workers_per_box"]) == ("job/0", 5, 1, 2)
    assert found["boxes"] == [
        {
            "box": 0,
            "step": 5,
            "epoch": 0,
            "live_slots": [0, 1],
            "next_slot": 1,
            "slots": [{"delivered": 3, "total": 3}, {"delivered": 2, "total": 2}],
            "digest": found["boxes"][0]["digest"],
        }
    ]
    assert len(found["boxes"][0]["digest"]) == 16
    first, second = found["workers"]
    names = ("global_worker_id", "box", "slot", "step", "worker_step", "samples_streamed", "epoch", "user_state_dict")
    assert [first[name] for name in names] == [0, 0, 0, 5, 3, 12, 0, {"start": 0, "done": 3}]
    assert [second[name] for name in names] == [1, 0, 1, 5, 2, 8, 0, {"start": 0, "done": 2}]
    assert first["state_methods"] == 4
    assert first["state_bytes"] > 0
    assert first["digest"] != second["digest"]
    assert len(first["digest"]) == 16
    shown = running.shell.call("state", "job/0", "--step", "5").stdout
    assert all(
        text in shown for text in ("Run job/0 at step 5", found["boxes"][0]["digest"], "{'done': 3, 'start': 0}")
    )


# ---- what a reply may hold, without a process


def test_state_of_a_loader_without_methods() -> None:
    record = pb.WorkerRecord(box=1, local_worker_id=1, num_boxes=2, num_workers_per_box=2, step=4, worker_step=2)
    fetched = FetchedState([(record, encode_state({"user": None, "restart": {}})), (record, b"")])
    for worker in state_dict("j/0", fetched)["workers"]:
        assert (worker["global_worker_id"], worker["user_state_dict"], worker["digest"]) == (3, None, None)
