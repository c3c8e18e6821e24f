"""`penstock doctor cluster`: real coordinators and workers, well and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.deploy.doctor.cluster_check import NO_ANSWER, check_worker
from penstock.deploy.doctor.findings import Finding
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import worker_view


@pytest.fixture(scope="module")
def cluster(coordinator: Any) -> Any:
    """A coordinator and a worker with two slots."""
    coordinator.start("worker", "--slots", "2", "--allow", "streams", "--name", "w1")
    return coordinator


def findings(shell: Any) -> tuple[int, dict[str, dict[str, str]]]:
    done = shell.call("doctor", "cluster", "--json")
    assert done.stderr == ""
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def test_a_cluster_that_is_well(cluster: Any) -> None:
    code, found = findings(cluster)
    assert code == 0
    assert list(found) == ["worker w1"]
    assert {each["level"] for each in found.values()} == {"ok"}
    assert found["worker w1"]["found"].startswith("lanes at 127.0.0.1:")
    assert found["worker w1"]["found"].endswith("; on this host")


def test_a_worker_whose_lanes_cannot_be_reached(cluster: Any) -> None:
    async def register() -> None:
        from penstock.proto.rpc.calls import AsyncCoordinatorClient

        address, token = cluster.environment["PENSTOCK_COORDINATOR"], cluster.environment["PENSTOCK_TOKEN"]
        async with AsyncCoordinatorClient(address, token, insecure=True) as client:
            await client.register(
                pb.RegisterWorkerRequest(
                    version="0.0.1", worker="far", session="s", host_id="elsewhere", slots=4, tcp_address="127.0.0.1:1"
                )
            )

    for _ in range(5):  # on a machine that is very busy its lease of 3 s may have run out
        asyncio.run(register())
        code, found = findings(cluster)
        if "worker far" in found:
            break
    assert (code, found["worker far"]["level"]) == (32, "problem"), found
    assert "lanes at 127.0.0.1:1, which cannot be reached from here: Connection refused" in found["worker far"]["found"]
    assert "--listen ITS-ADDRESS:0" in found["worker far"]["remedy"]


def of_worker(error: str = "", here: bool = False) -> Finding:
    return check_worker(worker_view(pb.WorkerStatus(worker="w", live=True, tcp_address="h:1")), error, here)


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (of_worker(), "ok"),
        (of_worker("no"), "problem"),
        (of_worker("no", here=True), "ok"),
        (of_worker(NO_ANSWER, here=True), "problem"),
    ],
)
def test_what_is_said_of_values(finding: Finding, level: str) -> None:
    assert finding.level == level, finding
    assert bool(finding.remedy) == (level != "ok")
