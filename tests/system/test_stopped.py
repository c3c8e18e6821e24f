"""SIGSTOP of each kind of process, for less and for more than a lease; and SIGCONT of what was replaced meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import traps
from census import alive, census, children, descendants, runners
from cluster import Cluster, running
from job import Job
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.proto import errors

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


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_stopped_helper_fails_only_the_save(cluster: Cluster, tmp_path: Path) -> None:
    (daemon,) = cluster.workers
    with cluster.box("scratch", num_workers_per_box=1, timeout_s=10) as appliance:
        released = tmp_path / "load_state_dict released"
        released.touch()
        loader = DataLoader(traps.waits_to_load, str(tmp_path))
        executor = DataExecutor(loader, num_steps=200, appliance=appliance)
        got = []
        runner: list[int] = []
        for batch in executor:
            got.append(batch["number"])
            if executor.step == 140:
                until((tmp_path / "load_state_dict reached").exists, 20, "the check of early snapshots does not begin")
                until(lambda: len(runners(daemon.pid)) == 1, 20, "the check of early snapshots does not end")
                runner += runners(daemon.pid)
            if executor.step == 150:
                released.unlink()  # or the helper might be done before it is seen and stopped
                with stopping_scratch(daemon.pid, runner[0]), pytest.raises(errors.DeadlineError, match="step 150"):
                    loader.state_dict()
                released.touch()
            if executor.step == 190:
                assert loader.state_dict(), "the restart points whose verification was stopped are of no use any more"
        assert got == [number for _ in range(20) for number in range(1, 13)][:200]
        # A verification that was stopped has two minutes. A warm helper, which slow machines start, is kept for 30 s.
        # The runner may be another one by now: on a slow machine a lease may have passed meanwhile.
        until(lambda: len(runners(daemon.pid)) == 1, 45, lambda: f"{listed(daemon.pid)} beside runner {runner}")


def listed(daemon: int) -> dict[int, str]:
    """Return the states and threads' names of what is forked on a worker, by process."""
    return {
        pid: " ".join(path.read_text().split(" ")[1:3])
        for pid in runners(daemon)
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    }


@contextmanager
def stopping_scratch(daemon: int, runner: int) -> Iterator[None]:
    """Stop at once whatever is forked beside the runner, until the block ends."""
    done = threading.Event()
    stopped: list[int] = []

    def watch() -> None:
        while not done.wait(0.002):
            for pid in runners(daemon):
                if pid != runner and pid not in stopped:
                    stop([pid])
                    stopped.append(pid)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
        go_on(stopped)  # a verification may be among them, for which nobody waits and which has two minutes
    assert stopped, "no helper process was needed"
