"""`penstock status` and `penstock state`, on an idle coordinator and on a real run: trainer, workers, two loaders."""

from __future__ import annotations

import contextlib
import json
import os
import pty
from collections.abc import Iterator
from typing import Any

import pytest
import streams
from fake_cluster import FakeCluster
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.deploy.operations.show_state import as_dict as state_dict
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb

STEPS = 7


def rows(text: str, title: str) -> list[list[str]]:
    """The rows of a plain table: cells are two blanks apart."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    table = []
    for line in lines[start + 2 :]:
        if not line.strip():
            break
        table.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return table


def heads(text: str, title: str) -> list[str]:
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    return [cell.strip() for cell in lines[start + 1].split("  ") if cell.strip()]


def test_idle(coordinator: Any) -> None:
    done = coordinator.call("status")
    assert done.returncode == 0
    first, _, last = done.stdout.splitlines()
    assert first.startswith(f"No runs at {coordinator.environment['PENSTOCK_COORDINATOR']} (Penstock ")
    assert last == "No workers: start some with `penstock worker`."
    found = json.loads(coordinator.call("status", "--json").stdout)
    assert (found["runs"], found["workers"]) == ([], [])
    assert found["coordinator"]["address"] == coordinator.environment["PENSTOCK_COORDINATOR"]
    assert found["coordinator"]["uptime_s"] > 0


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
    with Appliance(address, token=token, job="job", num_workers_per_box=2, seed=5, timeout_s=60) as appliance:
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
    assert {name: run[name] for name in ("run", "attempt", "open", "input_fn", "num_boxes", "num_workers_per_box")} == {
        "run": "job/0",
        "attempt": 1,
        "open": True,
        "input_fn": "streams:shared",
        "num_boxes": 1,
        "num_workers_per_box": 2,
    }
    assert (box["box"], box["live"], box["epoch"], box["epoch_ended"]) == (0, True, 0, False)
    assert 0 <= box["waited_share"] <= 1
    slots = [(slot["slot"], slot["worker"], slot["phase"], slot["error"]) for slot in box["slots"]]
    assert slots == [(0, "w1", "READY", None), (1, "w1", "READY", None)]
    assert "ticket" not in json.dumps(found)
    assert (worker["worker"], worker["slots"], worker["slots_used"], worker["live"]) == ("w1", 4, 2, True)


def test_status_in_plain_text(running: Running) -> None:
    until(lambda: running.json("status")["runs"][0]["boxes"][0]["step"] == STEPS)
    text = running.shell.call("status").stdout
    assert text.isascii()
    assert rows(text, "Runs at ") == [["job/0", "1", "open", "1", "2", "streams:shared"]]
    (box,) = rows(text, "Boxes")
    assert box[:5] == ["job/0", "0", "live", str(STEPS), "0"]
    assert heads(text, "Boxes") == ["run", "box", "state", "step", "epoch", "steps/s", "waits", "waits for"]
    assert len(box) == 8
    assert [row[:5] for row in rows(text, "Slots")] == [
        ["job/0", "0", "0", "ready", "w1"],
        ["job/0", "0", "1", "ready", "w1"],
    ]
    (worker,) = rows(text, "Workers")
    assert worker[:3] == ["w1", "live", "2/4"]


def test_status_on_a_terminal_is_drawn(running: Running) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as screen:
        with os.fdopen(theirs, "wb") as terminal:
            environment = running.shell.env({"TERM": "xterm", "COLUMNS": "120"})
            status = running.shell.fork(("status",), environment, terminal.fileno(), 2)
            assert status.wait(60) == 0
        drawn = b""
        with contextlib.suppress(OSError):  # the other end is closed, and all is read
            while True:
                drawn += os.read(screen.fileno(), 1 << 16)
    text = drawn.decode()
    assert "─" in text
    assert "streams:shared" in text


@pytest.fixture(scope="module")
def found_at_5(running: Running) -> Any:
    """Return the output of `penstock state` for step 5."""
    return running.json("state", "job", "--step", "5")


def test_state_at_a_step(found_at_5: Any) -> None:
    found = found_at_5
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


def test_state_without_a_step_is_the_newest(running: Running) -> None:
    until(lambda: running.json("state", "job/0")["step"] == STEPS)


def test_state_in_plain_text(running: Running, found_at_5: Any) -> None:
    done = running.shell.call("state", "job/0", "--step", "5")
    assert done.returncode == 0
    digest = found_at_5["boxes"][0]["digest"]
    assert rows(done.stdout, "Run job/0 at step 5") == [["0", "5", "0", "1", "0 1", "3/3, 2/2", digest]]
    records = rows(done.stdout, "DataLoaderCheckpoint records")
    assert [row[:7] for row in records] == [["0", "0", "0", "5", "3", "12", "0"], ["1", "0", "1", "5", "2", "8", "0"]]
    assert [row[-1] for row in records] == ["{'done': 3, 'start': 0}", "{'done': 2, 'start': 0}"]


# ---- what a reply may hold, without a process


def test_waited_share_covers_one_report_interval() -> None:
    world = FakeCluster()
    world.worker("w")
    box = world.open()
    box.deliver(1)

    def after(seconds: float, waited_s: float) -> float:
        world.now += seconds
        request = box.progress()
        request.waited_s = waited_s
        world.watch(request)
        return world.status().runs[0].boxes[0].waited_share

    assert after(2, 1.0) == 0.5
    assert after(4, 2.0) == 0.25
    assert after(2, 2.0) == 0.0
    assert after(1, 0.5) == 0.0  # another executor, which counts from 0
    assert after(1, 1.5) == 1.0


def test_state_of_a_loader_without_methods() -> None:
    record = pb.WorkerRecord(box=1, local_worker_id=1, num_boxes=2, num_workers_per_box=2, step=4, worker_step=2)
    fetched = FetchedState([(record, encode_state({"user": None, "restart": {}})), (record, b"")])
    for worker in state_dict("j/0", fetched)["workers"]:
        assert (worker["global_worker_id"], worker["user_state_dict"], worker["digest"]) == (3, None, None)
