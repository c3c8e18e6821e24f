"""Real hosts as far as the network goes, and real partitions: packets that vanish, in one direction or both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from census import census, runners
from hosts import HostCluster, Network, why_not
from interpreters import let_go
from job import Job
from waiting import until


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    network = Network("coordinator", "near", "far", "trainer")
    try:
        yield network
    finally:
        network.close()


@pytest.mark.timeout(180)
def test_partitions_between_three_hosts(network: Network, tmp_path: Path) -> None:
    cluster = HostCluster(tmp_path / "state", network)
    options = {"input": "stateful", "arguments": [400], "workers": 2, "steps": 1500}
    jobs: list[Job] = []
    try:
        far = cluster.add_host("far", 4, "streams")
        job = Job(cluster, cluster.python("trainer"), job="job", pace_s=0.005, **options)
        jobs.append(job)
        job.reach(100)
        near = cluster.add_host("near", 4, "streams")

        # A worker's host is gone, and nobody is told: its lane is open and silent. The slot moves, and the new lane is
        # used at once.
        held = runners(far.pid)
        assert held
        for other in ("coordinator", "trainer"):
            network.drop("far", other)
            network.drop(other, "far")
        until(lambda: runners(near.pid), 30, "the slots do not move")
        job.reach(job.step + 300, 30)
        assert set(held) & set(runners(far.pid)), "it still believes that the slots are its own"
        for other in ("coordinator", "trainer"):
            network.pass_again("far", other)
            network.pass_again(other, "far")
        until(lambda: not census(far.pid)["processes"], 30, "the old generation's runners go on")

        # One way only, between the lane's two hosts: the coordinator hears both. Its data are lost, and
        # then its acks. The slots go to the worker that the training job can reach.
        daemons = {"near": near, "far": far}
        for away, to, one_way in (("near", "far", ("near", "trainer")), ("far", "near", ("trainer", "far"))):
            network.drop(*one_way)
            until(lambda to=to: runners(daemons[to].pid), 60, f"the slots do not leave {away}")  # type: ignore[misc]
            job.reach(job.step + 100, 60)
            network.pass_again(*one_way)

        # The trainer's cable, for less than a lease.
        network.link("trainer", up=False)
        time.sleep(2)
        network.link("trainer", up=True)
        got = job.finish(120)
        assert sorted(got) == list(range(1, 1501))
        calm = Job(cluster, cluster.python("trainer"), job="calm", **options)
        jobs.append(calm)
        assert calm.finish(60) == got
    finally:
        for each in jobs:
            each.drop()
        let_go(cluster.python("trainer"))  # what runs inside of a network namespace keeps it
        cluster.stop()
