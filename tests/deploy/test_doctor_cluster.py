"""`penstock doctor cluster`: real coordinators and workers, well and not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from typing import Any

import pytest
from waiting import until

from penstock.deploy.doctor.cluster_check import (
    NO_ANSWER,
    JobRequirements,
    check_cluster,
    check_lost,
    check_skew,
    check_slots,
    check_worker,
)
from penstock.deploy.doctor.findings import Finding
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import view, worker_view


@pytest.fixture(scope="module")
def cluster(coordinator: Any) -> Any:
    """A coordinator and a worker with two slots."""
    coordinator.start("worker", "--slots", "2", "--allow", "streams", "--name", "w1")
    return coordinator


def findings(shell: Any, *arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = shell.call("doctor", "cluster", "--json", *arguments, **environment)
    assert done.stderr == ""
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def of(shell: Any, job: JobRequirements) -> dict[str, Finding]:
    """Run in this process."""
    environment = shell.environment
    address, token = environment["PENSTOCK_COORDINATOR"], environment["PENSTOCK_TOKEN"]
    with CoordinatorClient(address, token) as client:
        return {each.check: each for each in check_cluster(client, address, None, job)}


def test_a_cluster_that_is_well(cluster: Any) -> None:
    for _ in range(5):  # a worker that was not heard of for 2 s is a warning
        code, found = findings(cluster, "--boxes", "1", "--workers", "2", "--input-fn", "streams:slow")
        if found["worker w1"]["level"] == "ok":
            break
    assert code == 0
    assert list(found) == ["clock", "worker w1", "slots"]
    assert {each["level"] for each in found.values()} == {"ok"}
    assert re.match(r"live, last heartbeat .* ago, 0 of 2 slots used, lanes at", found["worker w1"]["found"])
    assert "2 free on 1 of 1 workers that may run streams:slow" in found["slots"]["found"]


def test_what_is_asked_for_and_not_there(cluster: Any) -> None:
    code, found = findings(cluster, "--boxes", "2", "--workers", "3")
    assert (code, found["slots"]["level"]) == (32, "problem")
    assert "2 x 3 = 6 are needed" in found["slots"]["found"]
    assert "penstock worker --slots 4" in found["slots"]["remedy"]
    slots = of(cluster, JobRequirements(input_fn="elsewhere.data:fn"))["slots"]
    assert slots.level == "problem"
    assert "no worker may run elsewhere.data:fn: the workers' --allow is streams" in slots.found
    assert "--allow elsewhere" in slots.remedy


def test_unreachable_coordinator_is_an_error(cluster: Any) -> None:
    for arguments, token, code in ((("--coordinator", "127.0.0.1:1"), None, 11), ((), "another-one", 12)):
        more = {} if token is None else {"PENSTOCK_TOKEN": token}
        done = cluster.call("doctor", "cluster", *arguments, **more)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr


def test_a_worker_whose_lanes_cannot_be_reached(cluster: Any) -> None:
    async def register() -> None:
        from penstock.proto.rpc.calls import AsyncCoordinatorClient

        address, token = cluster.environment["PENSTOCK_COORDINATOR"], cluster.environment["PENSTOCK_TOKEN"]
        async with AsyncCoordinatorClient(address, token) as client:
            await client.register(
                pb.RegisterWorkerRequest(
                    version="0.0.1", worker="far", session="s", host_id="elsewhere", slots=4, tcp_address="127.0.0.1:1"
                )
            )

    for _ in range(5):  # on a machine that is very busy its lease of 3 s may have run out
        asyncio.run(register())
        found = of(cluster, JobRequirements())["worker far"]
        if "lost" not in found.found:
            break
    assert found.level == "problem", found
    assert "lanes at 127.0.0.1:1, which cannot be reached from here: Connection refused" in found.found
    assert "--listen ITS-ADDRESS:0" in found.remedy


def test_hanging_and_lost_workers_are_reported(cluster: Any) -> None:
    stopped = cluster.start("worker", "--slots", "1", "--allow", "streams", "--name", "stopped")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        found = findings(cluster)[1]["worker stopped"]
        # On a machine that is very busy its lease of 3 s may have run out by now.
        assert found["level"] == "problem" or "lost" in found["found"], found
    finally:
        stopped.stop(signal.SIGKILL)
    until(lambda: "lost" in of(cluster, JobRequirements())["worker stopped"].found)
    lost = of(cluster, JobRequirements())["worker stopped"]
    assert lost.level == "warning"


def test_forgotten_worker_is_named_for_a_while() -> None:
    reply = pb.StatusReply()
    reply.workers.add(worker="back", live=True)
    for name, age_s in (("old", 5000), ("gone", 90), ("back", 80), ("gone", 9)):
        reply.events.add(kind="worker lost", worker=name, age_s=age_s, text="its lease ran out")
    reply.events.add(kind="worker left", worker="told", age_s=1)
    assert [(each.check, each.found) for each in check_lost(view(reply))] == [
        ("worker gone", "lost 9.0 s ago: its lease ran out")
    ]


def test_draining_workers_have_no_free_slots() -> None:
    workers = [
        worker_view(pb.WorkerStatus(worker="w", live=True, slots=4, slots_used=1)),
        worker_view(pb.WorkerStatus(worker="leaves", live=True, draining=True, slots=8)),
        worker_view(pb.WorkerStatus(worker="lost", slots=8)),
    ]
    assert check_slots(workers, JobRequirements()).found == "3 free on 1 of 1 workers"
    assert check_slots(workers, JobRequirements(boxes=3)).level == "ok"
    assert check_slots(workers, JobRequirements(workers=4)).level == "problem"
    none_ready = check_slots(workers[1:], JobRequirements(input_fn="mine:fn"))
    assert (none_ready.level, none_ready.found) == ("warning", "0 free on 0 of 0 workers that may run mine:fn")


def of_worker(reached: str = "", here: bool = False, **status: Any) -> Finding:
    return check_worker(worker_view(pb.WorkerStatus(worker="w", **status)), reached, here, "0.1.0")


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (check_skew(0.1, 0.3), "ok"),
        (check_skew(-0.5, 0.3), "ok"),
        (check_skew(5.0, 0.3), "warning"),
        (check_skew(2.2, 0.3), "ok"),  # the call took as long
        (check_skew(-5.0, 0.3), "warning"),
        (check_skew(-4000.0, 0.3), "problem"),
        (check_skew(-1.8e9, 0.3), "warning"),  # it does not tell
        (of_worker(), "warning"),
        (of_worker(live=True, draining=True), "warning"),
        (of_worker(live=True, version="0.9.0"), "warning"),
        (of_worker("no", live=True, tcp_address="h:1"), "problem"),
        (of_worker("no", here=True, live=True, tcp_address="h:1"), "ok"),
        (of_worker(NO_ANSWER, here=True, live=True, tcp_address="h:1"), "problem"),
        (of_worker(here=True, live=True, seen_s_ago=2.5), "warning"),
    ],
)
def test_what_is_said_of_values(finding: Finding, level: str) -> None:
    assert finding.level == level, finding
    assert bool(finding.remedy) == (level != "ok")
