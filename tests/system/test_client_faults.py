"""A training process is killed: what its run held is free within a lease, or at once when it is started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from census import alive, census, descendants, settled, until
from cluster import running
from job import Job

LEASE_S = 10.0
"""Of a client (appliance/limits.py)."""


@pytest.mark.timeout(180)
def test_killed_it_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(tmp_path / "state") as cluster:
        daemon = cluster.add_worker(8, allow="streams")
        processes = [daemon.pid, cluster.coordinator.pid]
        options: dict[str, Any] = {"input": "stateful", "arguments": [400], "steps": 60}
        whole = Job(cluster, job="whole", **options).finish()
        until(lambda: not census(daemon.pid)["processes"], 10, "a run that was closed left processes")
        before = [census(pid) for pid in processes]

        options |= {"steps": 60_000, "pace_s": 0.01}  # they go on while others start, and not as fast as they can
        jobs = [Job(cluster, job=lane, lane=lane, **options) for lane in ("auto", "tcp")]
        again = Job(cluster, job="again", state=str(tmp_path / "saved"), save=20, **options)
        jobs.append(again)
        for job in jobs:
            job.reach(50)
        held = descendants(daemon.pid)
        landers = descendants(jobs[1].pid)
        assert len(held) >= 6
        assert landers, "there is a lander"
        for job in jobs:
            job.kill()
        killed = time.monotonic()
        until(lambda: not alive(landers), 2, "the lander ends with its trainer")

        again.start(steps=60, pace_s=0, resume=again.saved[40])
        resumed = again.finish()
        if time.monotonic() - killed < LEASE_S - 2:
            # Six runners of three runs; those of the attempt that was superseded went at once.
            assert len(alive(held)) <= len(held) - 2
        settled(processes, before, LEASE_S + 5 - (time.monotonic() - killed) + 2)
        assert resumed[60] == whole[60]
        for job in jobs:
            assert [job.batches[step] for step in range(1, 51)] == [whole[step] for step in range(1, 51)]
