"""SIGSTOP of each kind of process, for less and for more than a lease; and SIGCONT of what was replaced meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from census import alive, census, children, descendants, runners
from cluster import Cluster, running
from job import Job
from waiting import until

WORKER_LEASE_S, CLIENT_LEASE_S = 6.0, 10.0


def stop(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(pids: Sequence[int]) -> None:
    for pid in alive(list(pids)):
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with one worker daemon. All jobs have one seed, so it has one fork server for all of them."""
    options = ["--worker-lease-s", str(WORKER_LEASE_S), "--client-lease-s", str(CLIENT_LEASE_S)]
    with running(tmp_path_factory.mktemp("state"), options=options) as cluster:
        cluster.add_worker(8, "--allow", "traps", allow="streams", name="first")
        yield cluster


@contextmanager
def jobs_of(cluster: Cluster, *many: dict[str, Any]) -> Iterator[list[Job]]:
    started = [Job(cluster, **options) for options in many]
    try:
        yield started
    finally:
        for job in started:
            job.drop()


@pytest.mark.timeout(180)
def test_replaced_while_they_were_stopped(cluster: Cluster) -> None:
    """A whole worker machine, and a training process, for longer than their leases."""
    (first,) = cluster.workers
    options = {"input": "stateful", "arguments": [400], "steps": 700}
    frozen = {"job": "frozen", "workers": 2, "pace_s": 0.005, **options}
    superseded = {"job": "superseded", "workers": 1, "pace_s": 0.002, **options, "steps": 60_000}
    moved = {"job": "moved", "workers": 2, "lane": "tcp", "pace_s": 0.01, **options}
    with jobs_of(cluster, frozen, superseded, moved) as (one, two, three), ExitStack() as closing:
        for job in (one, two, three):
            job.reach(30)
        old_runners = runners(first.pid)
        assert len(old_runners) >= 5
        machine = [first.pid, *descendants(first.pid)]
        stop([one.pid, two.pid])
        stop(machine)
        second = closing.enter_context(cluster.joined(8, name="second"))
        time.sleep(WORKER_LEASE_S + 2)
        with jobs_of(cluster, {**superseded, "steps": 20}) as (target,):
            target.finish()
        time.sleep(CLIENT_LEASE_S - WORKER_LEASE_S)
        go_on(machine)
        until(lambda: not alive(old_runners), 10, "runners of slots that had moved went on")
        go_on([one.pid, two.pid])
        assert two.end() == 1, "its attempt was superseded"
        whole = one.finish()
        assert one.recoveries
        assert three.finish() == whole
        assert three.recoveries
        assert target.batches.items() <= two.batches.items()
        both = [first.pid, second.pid]
        until(lambda: not any(census(pid)["processes"] for pid in both), CLIENT_LEASE_S + 5, "processes are left")
    with jobs_of(cluster, {"job": "reference", "workers": 2, **options}) as (reference,):
        assert reference.finish() == whole


@pytest.mark.timeout(180)
def test_nothing_but_time(cluster: Cluster) -> None:
    """The coordinator for longer than every lease; a daemon for less than its own; those without a lease for long."""
    (daemon,) = cluster.workers
    options = {"input": "stateful", "arguments": [400], "lane": "tcp", "steps": 900}
    with jobs_of(cluster, {"job": "job", "pace_s": 0.005, **options}) as (job,):
        job.reach(30)
        fork_servers, receivers = children(daemon.pid, "fork_server"), children(job.pid, "receiver.py")
        assert fork_servers
        assert receivers
        for brief in ([daemon.pid], fork_servers, receivers, runners(daemon.pid)[:1], [job.pid]):
            stop(brief)
            time.sleep(1.0)
            go_on(brief)
            job.reach(job.step + 20)
        long = [cluster.coordinator.pid, *fork_servers, *receivers, *runners(daemon.pid)[:1]]
        stop(long)
        time.sleep(CLIENT_LEASE_S + 1)
        go_on(long)
        stopped = job.finish()
        assert job.recoveries == 0
    with jobs_of(cluster, {"job": "another reference", **options, "lane": "auto"}) as (reference,):
        assert reference.finish() == stopped
