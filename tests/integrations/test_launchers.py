"""Ranks as launchers start them, restart them and count them: torchrun on several machines, with a wrapper, mp.spawn,
Lightning. Whole programs, with the real launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import INPUTS, SUPPORT, Cluster, running
from hosts import Network, why_not
from waiting import until

STEPS = 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{INPUTS}{os.pathsep}{SUPPORT}", "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


class TwoAgents:
    """Two launchers, as on two machines, with one rank each, which train against one coordinator."""

    def __init__(self, cluster: Cluster, folder: Path, kind: str, *, shared_store: bool, stack: ExitStack) -> None:
        self.folder, self.kind, self._cluster, self._stack = folder, kind, cluster, stack
        self._port, self._run_id = free_port(), uuid.uuid4().hex
        self._environment = {**cluster.environment, "OMP_NUM_THREADS": "1"}
        if not shared_store:
            self._environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.agents = [self._agent(HOLDS="1")]
        until(self._has_store)  # so that it is the first one that has it
        self.agents.append(self._agent())

    def _has_store(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", int(self._port))) == 0

    def _agent(self, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-id={self._run_id}"]
        command += ["--max-restarts=3", f"{INPUTS}/rounds.py", str(self.folder), self._cluster.address, str(STEPS)]
        environment = {**self._environment, **environment}
        agent = subprocess.Popen([*command, self.kind], env=environment, start_new_session=True)
        self._stack.callback(agent.wait)
        self._stack.callback(agent.kill)
        return agent

    def rows(self, rank: int) -> dict[int, set[int]]:
        """Step -> the rows that the rank got at it, in all rounds."""
        found: dict[int, set[int]] = {}
        path = self.folder / f"rows-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            step, row = json.loads(line)
            found.setdefault(step, set()).add(row)
        return found

    def reach(self, step: int) -> None:
        while max(self.rows(0), default=0) < step:
            assert None in [agent.poll() for agent in self.agents], "both have ended"
            time.sleep(0.05)

    def kill_rank(self, rank: int) -> None:
        os.kill(int((self.folder / f"process-{rank}").read_text()), signal.SIGKILL)

    def replace_agent(self) -> None:
        """Kill the launcher that does not hold the rendezvous, whose rank lives on, and start another one."""
        self.agents[1].kill()
        self.agents[1].wait()
        self.agents[1] = self._agent()

    def assert_all_trained(self) -> None:
        for agent in self.agents:
            assert agent.wait(200) == 0
        for rank in (0, 1):
            assert self.rows(rank) == {step: {2 * (step - 1) + rank} for step in range(1, STEPS + 1)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(8)
        yield cluster


@pytest.mark.timeout(400)
def test_all_ranks_of_a_round_are_one_attempt(cluster: Cluster, tmp_path: Path) -> None:
    """Each launcher counts the restarts that it caused. The boxes superseded each other until none was left."""
    with ExitStack() as stack:
        agents = TwoAgents(cluster, tmp_path, "gloo", shared_store=False, stack=stack)
        agents.reach(5)
        agents.kill_rank(1)
        agents.reach(12)
        agents.kill_rank(0)
        agents.reach(19)
        agents.replace_agent()
        agents.assert_all_trained()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["plain", "early"])
def test_rounds_that_share_a_port_are_told_apart(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """torch's default. Without collectives: these may find the dead round's addresses in the store, and stall."""
    with ExitStack() as stack:
        agents = TwoAgents(cluster, tmp_path, kind, shared_store=True, stack=stack)
        if kind == "plain":
            agents.reach(5)
            agents.kill_rank(1)
            agents.reach(12)
            agents.kill_rank(0)
        agents.assert_all_trained()
        assert kind == "plain" or [(tmp_path / f"lives-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


def said(*command: str, **environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        command, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=280, check=False
    )
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")), done.stderr


SHARED = ["rank 0 [0, 2, 4, 6]", "rank 1 [1, 3, 5, 7]"]
RANKED = """
import os
import streams
from penstock.client import DataExecutor, DataLoader

if __name__ == "__main__":
    rows = [int(batch["number"]) for batch in DataExecutor(DataLoader(streams.shared, 20), num_steps=4)]
    os.write(1, f"rank {os.environ['RANK']} {rows}\\n".encode())
"""


def test_a_wrapper_may_start_each_rank(tmp_path: Path) -> None:
    """As profilers and `srun` wrap them: the ranks of one launch have different parents."""
    (tmp_path / "train.py").write_text(RANKED)
    wrapper = tmp_path / "wrap.sh"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    rows, stderr = said(sys.executable, *launch, str(wrapper), str(tmp_path / "train.py"), PENSTOCK_TIMEOUT_S="60")
    assert rows == SHARED, stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["env", "ddp", "ddp_spawn"])
def test_torch_distributed_tells_the_rank(how: str) -> None:
    """The launcher sets no RANK: each rank was box 0 of 1, and trained on the same rows."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()} if how == "env" else {}
    rows, stderr = said(sys.executable, f"{INPUTS}/spawned_ranks.py", how, **place)
    assert rows == SHARED, stderr


def test_ranks_that_cannot_find_each_other_are_refused() -> None:
    rows, stderr = said(sys.executable, f"{INPUTS}/spawned_ranks.py", "tcp", A_PORT=free_port())
    assert rows == []
    assert "Appliance(num_boxes=2) over several processes needs a coordinator's address" in stderr
    assert "or let torchrun or MASTER_ADDR=localhost say that all are here" in stderr


@pytest.mark.timeout(300)
def test_torchrun_on_two_nodes_needs_one_file(tmp_path: Path) -> None:
    """As docs/security.md says: no other setting, no clear text, and no file of another role on the second node."""
    if reason := why_not():
        pytest.skip(reason)
    environment = {name: text for name, text in ENVIRONMENT.items() if name != "PENSTOCK_INSECURE"}
    (tmp_path / "train.py").write_text(RANKED)
    penstock = str(Path(sys.executable).with_name("penstock"))
    up = [penstock, "up", "--detach", "--dir", "fleet", "--workers", "1", "--slots", "4", "--allow", "streams"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-port=29500"]
    network = Network("head", "node")
    with ExitStack() as stack:
        stack.callback(network.close)
        head, node = tmp_path / "fleet" / "credentials", tmp_path / "node"
        address = f"{network.addresses['head']}:7070"
        started = [*network.inside("head"), *up, "--listen", address]
        subprocess.run(started, env=environment, cwd=tmp_path, check=True, capture_output=True)
        stack.callback(subprocess.run, [penstock, "down", "--dir", "fleet"], env=environment, cwd=tmp_path)
        node.mkdir()
        shutil.copy(head / "client.pem", node)
        environment |= {"PENSTOCK_COORDINATOR": address, "PENSTOCK_JOB": "two", "PENSTOCK_TIMEOUT_S": "100"}
        agents = []
        for rank, (host, folder) in enumerate((("head", head), ("node", node))):
            own = {**environment, "PENSTOCK_CREDENTIALS": str(folder / "client.pem")}
            where = [f"--node-rank={rank}", f"--master-addr={network.addresses['head']}", str(tmp_path / "train.py")]
            agents.append(
                subprocess.Popen([*network.inside(host), *launch, *where], env=own, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(agents[-1].wait)
            stack.callback(agents[-1].kill)
        assert [agent.communicate(timeout=200)[0].strip() for agent in agents] == SHARED
