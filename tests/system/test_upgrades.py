"""Coordinator, workers and jobs of an earlier commit and of this tree, replaced one by one while a job runs.

There are no releases with a tag yet, so the earlier one is the first commit whose callers show their tokens. A later
one is a copy of this tree with another number of the protocol of lanes.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import streams
import torch
from cluster import TOKEN, Cluster, Daemon, running
from job import Job
from trainer import fingerprint

from penstock.client import DataExecutor, DataLoader
from penstock.proto.errors import NoWorkersError
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

REPO = Path(__file__).resolve().parents[2]
EARLIER = "8e1d603a3f7977b283ff62ffeda0356c15cafed4"
ROOTS = ("proto", "appliance", "worker", "client", "deploy")
THIS = ""
"""Path of this tree: what is installed."""
OPTIONS = {"input": "counter", "arguments": [1 << 40], "pace_s": 0.01, "steps": 1 << 30}
LATER = LANE_PROTOCOL + 1


def path_of(tree: Path) -> str:
    """Return the PYTHONPATH of processes of that tree."""
    return os.pathsep.join(str(tree / name) for name in (*ROOTS, "tests/inputs", "tests/support"))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> str:
    packed = subprocess.run(
        ["git", "-C", str(REPO), "archive", EARLIER, *ROOTS, "tests/inputs", "tests/support"], capture_output=True
    )
    if packed.returncode:
        pytest.skip(f"the earlier commit is not in this clone, which may be shallow: {packed.stderr.decode().strip()}")
    tree = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(tree, filter="data")
    return path_of(tree)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> str:
    tree = tmp_path_factory.mktemp("later")
    for name in (*ROOTS, "tests/inputs", "tests/support"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    frames = tree / "proto/penstock/proto/lane/frames.py"
    changed, count = re.subn(r"(?m)^LANE_PROTOCOL = \d+$", f"LANE_PROTOCOL = {LATER}", frames.read_text())
    assert count == 1
    frames.write_text(changed)
    return path_of(tree)


class Fleet:
    """Cluster whose processes are of one tree or another."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._this = cluster.environment["PYTHONPATH"]

    def _use(self, path: str) -> None:
        self.cluster.environment = {**self.cluster.environment, "PYTHONPATH": path or self._this}

    def replace_coordinator(self, path: str) -> None:
        self._use(path)
        self.cluster.coordinator.kill()
        self.cluster.restart_coordinator()

    def worker(self, path: str, name: str, slots: int = 2) -> Daemon:
        self._use(path)
        return self.cluster.add_worker(slots, "--drain", "3", name=name)

    def job(self, path: str, job: str, **options: object) -> Job:
        self._use(path)
        python = ["env", f"PYTHONPATH={path}", sys.executable] if path else [sys.executable]
        return Job(self.cluster, python, job=job, **{**OPTIONS, **options})

    def slots(self, job: str) -> list[pb.SlotView]:
        with CoordinatorClient(self.cluster.address, TOKEN, insecure=True) as client:
            return next(list(run.boxes[0].slots) for run in client.status().runs if run.run == f"{job}/0")


def rows(steps: int) -> dict[int, int]:
    """Return the fingerprints of a job with two workers by step."""
    numbers = {step: 1000 * ((step - 1) % 2) + (step + 1) // 2 for step in range(1, steps + 1)}
    return {step: fingerprint({"x": torch.full((4,), n), "number": n}) for step, n in numbers.items()}


def steps_on(job: Job) -> None:
    """Wait for steps that the job takes from now on."""
    while job.hear(0):
        pass
    job.reach(job.step + 50)


def end(worker: Daemon) -> None:
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


@pytest.mark.parametrize("job_is", ["earlier", "this"])
def test_an_earlier_fleet_is_replaced_one_by_one(earlier: str, tmp_path: Path, job_is: str) -> None:
    """Its coordinator first, and its journal is read on; then each worker. The job's rows are those of one run, also
    when its next launch is of this tree."""
    with running(tmp_path / "state") as cluster:
        fleet = Fleet(cluster)
        fleet.replace_coordinator(earlier)
        workers = [fleet.worker(earlier, name) for name in ("a", "b")]
        options = {"save": 50, "state": str(tmp_path / "saved")}
        job = fleet.job(earlier if job_is == "earlier" else THIS, "job", **options)
        steps_on(job)
        fleet.replace_coordinator(THIS)
        for number, worker in enumerate(workers):
            steps_on(job)
            fleet.worker(THIS, f"new-{number}")
            end(worker)
        assert {slot.worker for slot in fleet.slots("job")} == {"new-0", "new-1"}
        steps_on(job)
        job.kill()
        assert job.batches == rows(job.step)
        saved = max(job.saved)
        again = fleet.job(THIS, "job", steps=saved + 100, resume=job.saved[saved])
        assert again.finish() == {step: row for step, row in rows(saved + 100).items() if step > saved}


def test_workers_of_other_lanes_get_no_slot_of_a_job(
    later: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers are replaced by those of a release with another protocol of lanes. The job keeps to its own, waits
    without one, names the reason, and goes on. A job of the later release runs on its workers meanwhile."""
    with running(tmp_path / "state") as cluster:
        fleet = Fleet(cluster)
        first, second = (fleet.worker(THIS, name) for name in ("a", "b"))
        job = fleet.job(THIS, "job")
        steps_on(job)
        fleet.worker(later, "later-a")
        end(first)
        assert {slot.worker for slot in fleet.slots("job")} == {"b"}
        steps_on(job)
        assert fleet.job(later, "another", steps=40).finish() == rows(40)
        fleet.worker(later, "later-b")
        end(second)
        with pytest.raises(NoWorkersError) as refused, cluster.box("third", timeout_s=5) as appliance:
            list(DataExecutor(DataLoader(streams.counter, 4), appliance=appliance))
        why = (
            f"2 workers speak lane protocol {LATER}, this job {LANE_PROTOCOL}: upgrade the job, or keep workers of its "
            "release"
        )
        assert refused.value.message.endswith(f"2 of its 2 worker slots have no worker (slot 0 is due). {why}")
        assert why in capfd.readouterr().err
        assert {slot.phase for slot in fleet.slots("job")} == {pb.WAITING}
        fleet.worker(THIS, "back")
        steps_on(job)
        job.kill()
        assert job.batches == rows(job.step)
