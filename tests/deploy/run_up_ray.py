"""`penstock up --engine ray` on a real Ray cluster of several nodes, on this machine: a node is killed in mid-run, then
the coordinator; the stream is that of an undisturbed run, batch by batch.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import SUPPORT
from job import Job
from waiting import until

from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.runtime.process.identity import Identity

pytestmark = [
    pytest.mark.timeout(300),  # Ray takes its time to start nodes, and to notice that one is gone
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
}
STEPS = 120
OURS = {"num_cpus": 2, "resources": {"boxes": 1}, "object_store_memory": 80 << 20}
"""A node where workers may be."""


class RayFleet:
    """A fleet on a Ray cluster of its own."""

    def __init__(self, shell: Any, cluster: Any) -> None:
        self.shell, self.cluster = shell, cluster
        self.folder = FleetFolder(shell.folder / "fleet")
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]

    def run(self, *arguments: str) -> Any:
        return self.shell.run(*arguments, deadline_s=150, PYTHONWARNINGS=None)

    def up(self, *more: str) -> Any:
        return self.run(
            *("up", "--engine", "ray", "--ray-address", self.cluster.address, "--dir", "fleet", "--near", "boxes"),
            *("--allow", "streams", "--slots", "2", "--listen", f"127.0.0.1:{self.port}", "--insecure", *more),
            *("--state-dir", str(self.shell.folder / "node")),
        )

    def daemons(self) -> dict[str, dict[str, Any]]:
        fleet = self.folder.fleet()
        assert fleet is not None
        return {one.name: one.model_dump() for one in fleet.daemons}

    def job(self, name: str, **options: Any) -> Job:
        fleet = self.folder.fleet()
        assert fleet is not None
        path = os.pathsep.join([self.shell.environment["PYTHONPATH"], SUPPORT])
        environment = self.shell.env({"PYTHONPATH": path, "PYTHONWARNINGS": None})
        training: Any = SimpleNamespace(address=fleet.coordinator, environment=environment)
        return Job(training, job=name, input="shared_noisy", arguments=[STEPS], steps=STEPS, workers=2, **options)

    def status(self) -> dict[str, Any]:
        """Return the coordinator's view; nothing while it is away."""
        fleet = self.folder.fleet()
        assert fleet is not None
        done = self.shell.call("status", "--json", "--coordinator", fleet.coordinator)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def lanes(self) -> dict[str, str]:
        """Return the lane addresses of the live workers, by name."""
        workers = self.status().get("workers", [])
        return {one["worker"]: one["tcp_address"] for one in workers if one["live"] and not one["draining"]}


@pytest.fixture(scope="module")
def fleet(module_shell: Any) -> Iterator[RayFleet]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PYTHONPATH": module_shell.environment["PYTHONPATH"]}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        module_shell.environment |= QUIET
        # The head has room too, but is none of the nodes with boxes.
        head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                cluster.add_node(wait=False, **OURS)
            cluster.wait_for_nodes()
            yield RayFleet(module_shell, cluster)
        finally:
            session = cluster.head_node.get_session_dir_path()
            cluster.shutdown()
            shutil.rmtree(session, ignore_errors=True)


def test_lost_node_or_coordinator_keeps_batches(fleet: RayFleet) -> None:
    done = fleet.up("--workers", "2", "--send-token")
    assert done.returncode == 0, done.stderr
    assert f"PENSTOCK_TOKEN_FILE={fleet.folder.token}\n" in done.stdout
    on_node = fleet.shell.folder / "node" / "penstock" / "token"
    assert (on_node.read_text(), on_node.stat().st_mode & 0o777) == (fleet.folder.token.read_text(), 0o600)
    daemons, lanes = fleet.daemons(), fleet.lanes()
    near = {node.node_id: node for node in fleet.cluster.worker_nodes}
    assert {daemons[name]["node"] for name in ("penstock-1", "penstock-2")} == set(near)
    assert daemons["penstock-coordinator"]["node"] == fleet.cluster.head_node.node_id
    processes = [Identity.of(one[pid]) for one in daemons.values() for pid in ("pid", "actor_pid")]

    job = fleet.job("disturbed", pace_s=0.02)
    try:
        job.reach(STEPS // 4)
        # Held until its worker has died, which takes Ray a moment: a quick job would be over by then.
        lost = os.pidfd_open(daemons["penstock-1"]["pid"])
        job.process.send_signal(signal.SIGSTOP)
        fleet.cluster.remove_node(near[daemons["penstock-1"]["node"]], allow_graceful=False)
        assert select.select([lost], [], [], 60)[0]
        os.close(lost)
        job.process.send_signal(signal.SIGCONT)
        job.reach(STEPS // 2)
        os.kill(daemons["penstock-coordinator"]["pid"], signal.SIGKILL)
        disturbed = job.finish(110)
        assert job.recoveries
    finally:
        job.drop()

    # Ray has a place for the lost worker again: there it is, under its name. The coordinator, which Ray started
    # again with its actor, is where it was.
    fleet.cluster.add_node(**OURS)
    until(lambda: set(now := fleet.lanes()) == set(lanes) and now["penstock-1"] != lanes["penstock-1"])
    undisturbed = fleet.job("after").finish(110)
    assert len(undisturbed) == STEPS
    assert disturbed == undisturbed
    done = fleet.up("--workers", "2", "--slots", "1")
    assert done.returncode == 2
    assert "only --workers of a running fleet can be changed, but --slots is 2" in done.error

    # A fleet of N is N workers that can work: the drained one ends, not the one with the highest number, and one that
    # has left is replaced.
    record = fleet.folder.fleet()
    assert record is not None
    assert fleet.shell.call("worker", "drain", "penstock-1", "--coordinator", record.coordinator).returncode == 0
    done = fleet.up("--workers", "1")
    assert done.returncode == 0, done.stderr
    assert set(fleet.daemons()) == {"penstock-coordinator", "penstock-2"}
    until(lambda: set(fleet.lanes()) == {"penstock-2"})
    os.kill(fleet.daemons()["penstock-2"]["pid"], signal.SIGTERM)
    until(lambda: not fleet.lanes())
    done = fleet.up("--workers", "2")
    assert done.returncode == 0, done.stderr
    assert set(fleet.daemons()) == {"penstock-coordinator", "penstock-1", "penstock-3"}
    until(lambda: set(fleet.lanes()) == {"penstock-1", "penstock-3"})

    running = fleet.daemons()
    done = fleet.run("down", "--dir", "fleet")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"ended: actor {name}" for name in sorted(running)]
    until(lambda: all(identity.open() is None for identity in processes))
