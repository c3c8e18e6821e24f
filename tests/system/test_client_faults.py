"""A training process is killed: what its run held is free within a lease, or at once when it is started again; and who
asks for its state then is answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from census import alive, census, descendants, runners, settled, sockets
from cluster import TOKEN, Cluster, running
from job import Job
from waiting import until

from penstock.proto.errors import StateUnavailableError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

LEASE_S = 10.0
"""Lease of a client (appliance/model/limits.py), in seconds."""
OPTIONS: dict[str, Any] = {"input": "stateful", "arguments": [400]}
LONG: dict[str, Any] = {"steps": 60_000, "pace_s": 0.01}
FOR_EVER_S = 600.0
"""A lease that no test waits for: what is free before was freed by something else."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(8)
        yield cluster


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> dict[int, int]:
    """The run without a fault."""
    return Job(cluster, job="whole", **OPTIONS, steps=60).finish()


@pytest.mark.timeout(180)
def test_killed_it_leaves_nothing_behind(cluster: Cluster, whole: dict[int, int]) -> None:
    (daemon,) = cluster.workers
    processes = [daemon.pid, cluster.coordinator.pid]
    until(lambda: not census(daemon.pid)["processes"], 10, "a run that was closed left processes")
    before = [census(pid) for pid in processes]
    # They go on while others start, and not as fast as they can.
    jobs = [Job(cluster, job=lane, lane=lane, **OPTIONS, **LONG) for lane in ("auto", "tcp")]
    for job in jobs:
        job.reach(50)
    assert len(descendants(daemon.pid)) >= 4
    receivers = descendants(jobs[1].pid)
    assert receivers, "there is a receiver"
    for job in jobs:
        job.kill()
    until(lambda: not alive(receivers), 20, "the receiver ends with its trainer")
    settled(processes, before, LEASE_S + 7)
    for job in jobs:
        assert [job.batches[step] for step in range(1, 51)] == [whole[step] for step in range(1, 51)]

    _answered_at_once(cluster.address)
    cluster.coordinator.kill()
    cluster.restart_coordinator()
    _answered_at_once(cluster.address)


def _answered_at_once(address: str) -> None:
    """Check that queries are answered at once and not at their deadlines, which no test would wait for."""
    with CoordinatorClient(address, TOKEN, insecure=True) as client:
        for run in ("auto/0", "tcp/0"):
            with pytest.raises(StateUnavailableError, match="stopped reporting"):
                client.fetch_state(pb.FetchStateRequest(run=run, deadline_s=FOR_EVER_S, newest=True))


@pytest.mark.timeout(180)
def test_restarted_box_frees_its_slots_at_once(cluster: Cluster, whole: dict[int, int], tmp_path: Path) -> None:
    (daemon,) = cluster.workers
    cluster.coordinator.kill()
    cluster.restart_coordinator("--client-lease-s", str(FOR_EVER_S))
    until(lambda: not census(daemon.pid)["processes"], 10, "a run that was closed left processes")
    until(lambda: any(each.startswith("tcp") and each.endswith("state 01") for each in sockets(daemon.pid)))
    before = census(daemon.pid)

    again = Job(cluster, job="again", state=str(tmp_path / "saved"), save=20, **OPTIONS, **LONG)
    again.reach(50)
    held = runners(daemon.pid)
    assert len(held) >= 2
    again.kill()
    assert alive(held)
    again.start(steps=60, pace_s=0.1, resume=again.saved[40])  # two seconds of steps: it is there while they go
    again.reach(41)
    until(lambda: not alive(held), 10, "the superseded attempt holds its runners")
    assert again.finish() == whole
    settled([daemon.pid], [before], 10)
