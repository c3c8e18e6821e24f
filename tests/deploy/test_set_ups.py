"""The set-ups of docs/security.md and docs/deploy.md by the pages' own commands, on two machines: who has taken over a
file is refused once it is replaced, and everybody else goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from documented import REPO, blocks
from hosts import Network, why_not
from waiting import until

SECURITY = REPO / "docs/security.md"
OPENSSL, COMMANDS = (
    next(block.text for block in blocks(SECURITY) if block.text.startswith(word))
    for word in ("openssl req", "penstock worker")
)
TRAIN = """
import streams
from penstock.client import Appliance, DataExecutor, DataLoader

with Appliance(num_workers_per_box=2, seed=1, timeout_s=60) as appliance:
    steps = DataExecutor(DataLoader(streams.counter, 10), num_steps=20, appliance=appliance)
    print(sorted(int(batch["number"]) for batch in steps))
"""


def numbers(worker: int) -> list[int]:
    """Return what TRAIN gets from this worker and the next."""
    return [1000 * one + number for one in (worker, worker + 1) for number in range(1, 11)]


class Machines:
    """Two network namespaces, `head` and `node`, each with a folder of its own, and no setting of Penstock."""

    def __init__(self, folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
        self.network = Network("head", "node")
        stack.callback(self.network.close)
        self._stack, self.environment = stack, environment
        self.head, self.node = folder / "head", folder / "node"
        for own in (self.head, self.node):
            own.mkdir()
        (self.node / "train.py").write_text(TRAIN)

    def command(self, host: str, text: str) -> list[str]:
        """Return a command of the page with the addresses of these machines, and the tests' module."""
        addresses = self.network.addresses
        text = text.replace("10.0.0.1", addresses["head"]).replace("10.0.0.2", addresses["node"])
        return [*self.network.inside(host), "bash", "-c", f"exec env {text.replace('mypackage', 'streams')}"]

    def call(self, host: str, text: str) -> subprocess.CompletedProcess[str]:
        where = {"cwd": getattr(self, host), "env": self.environment}
        return subprocess.run(self.command(host, text), **where, capture_output=True, text=True, timeout=100)

    def run(self, host: str, text: str) -> str:
        done = self.call(host, text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def workers(self, status: str) -> dict[str, str]:
        """Return the live workers, with the addresses of their lanes."""
        workers = json.loads(self.run("node", f"{status} --json"))["workers"]
        return {worker["worker"]: worker["tcp_address"] for worker in workers if worker["live"]}

    def start(self, host: str, text: str) -> Path:
        """Start a daemon that ends with the test, and return its log once it is ready."""
        folder: Path = getattr(self, host)
        log = folder / f"log{len([*folder.glob('log*')])}"
        with log.open("wb") as err:
            daemon = subprocess.Popen(
                self.command(host, text), cwd=folder, env=self.environment, stdout=subprocess.PIPE, stderr=err
            )
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.terminate)
        assert daemon.stdout is not None
        self._stack.callback(daemon.stdout.close)
        assert daemon.stdout.readline(), log.read_text()
        return log


@pytest.fixture
def machines(shell: Any, tmp_path: Path) -> Iterator[Machines]:
    if reason := why_not() or ("" if shutil.which("openssl") else "the command openssl is not here"):
        pytest.skip(reason)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with ExitStack() as stack:
        none = {"PENSTOCK_TOKEN": None, "PENSTOCK_INSECURE": None}
        yield Machines(tmp_path, shell.env({**none, "PATH": path}), stack)


def put(file: Path, text: str) -> None:
    """Replace a file as the page says, by `mv`."""
    beside = file.with_suffix(".new")
    beside.touch(0o600)
    beside.write_text(text)
    beside.rename(file)


def parts_of(file: Path) -> tuple[str, str, str]:
    """Return a credentials file's certificate with its key, its CAs, and its lines of tokens."""
    certificate, key, *cas = re.findall(r"-----BEGIN.*?-----END[^\n]*\n", text := file.read_text(), re.DOTALL)
    return certificate + key, "".join(cas), "".join(re.findall(r"(?m)^\w+:.*\n", text))


def refused(machines: Machines, status: str, says: str) -> bool:
    done = machines.call("node", status)
    return done.returncode != 0 and says in done.stderr


def test_an_authority_of_openssl(machines: Machines) -> None:
    """The daemons, a training job and a command by the page's own lines. Then a token and the CA are replaced in the
    page's order, under a worker that stays. What was copied before is refused."""
    head, node = machines.head, machines.node
    (head / "later").mkdir()
    for folder in (head, head / "later"):
        subprocess.run(["bash", "-euo", "pipefail", "-c", OPENSSL], cwd=folder, check=True, capture_output=True)
    for role in ("worker", "client", "admin"):
        shutil.move(head / f"{role}.pem", node)
    (coordinator,) = re.findall(r"`(penstock coordinator --credentials [^`]*)`", SECURITY.read_text())
    worker, train, status = COMMANDS.splitlines()
    machines.start("head", coordinator.replace("DIR", "state"))
    machines.start("node", f"{worker} --name far")
    assert machines.run("node", train) == f"{numbers(0)}\n"
    before = machines.workers(status)

    stolen = status.replace("admin.pem", "stolen.pem")
    main, admin = head / "coordinator.pem", node / "admin.pem"
    shutil.copy(admin, node / "stolen.pem")
    own, ca, tokens = parts_of(main)
    old = tokens.rpartition("admin:")[2].strip()
    put(main, own + ca + tokens + f"admin:{'n' * 64}\n")
    put(admin, admin.read_text().replace(old, "n" * 64))
    until(lambda: machines.call("node", status).returncode == 0, 30)
    assert machines.call("node", stolen).returncode == 0, "both lines are there"
    put(main, main.read_text().replace(f"admin:{old}\n", ""))
    until(lambda: refused(machines, stolen, "the token is wrong"), 30)

    shutil.copy(admin, node / "stolen.pem")
    files = {
        file: head / "later" / file.name for file in (main, *(node / f"{r}.pem" for r in ("worker", "client", "admin")))
    }
    held = {file: parts_of(file) for file in files}
    (new,) = {parts_of(later)[1] for later in files.values()}

    def replace(made: Callable[[Path], str]) -> None:
        for file in files:
            put(file, made(file) + held[file][2])
        assert machines.workers(status) == before

    replace(lambda file: held[file][0] + held[file][1] + new)
    replace(lambda file: parts_of(files[file])[0] + held[file][1] + new)
    replace(lambda file: parts_of(files[file])[0] + new)
    assert refused(machines, stolen, "certificate")
    put(node / "stolen.pem", "".join((held[admin][0], ca, new, held[admin][2])))
    assert refused(machines, stolen, "certificate"), "also for whom trusts the new CA"
    assert machines.run("node", train) == f"{numbers(0)}\n"


def test_all_files_of_a_fleet_are_revoked(machines: Machines) -> None:
    """As the page says; the worker that has joined comes back once it has its new file."""
    worker, train, status = COMMANDS.splitlines()
    up = "penstock up --detach --dir fleet --workers 1 --slots 1 --allow streams --listen 10.0.0.1:7070"
    files = machines.head / "fleet" / "credentials"

    def copied() -> None:
        for role in ("worker", "client", "admin"):
            put(machines.node / f"{role}.pem", (files / f"{role}.pem").read_text())

    machines.run("head", up)
    try:
        copied()
        machines.start("node", f"{worker} --name far")
        assert set(machines.workers(status)) == {"far", "penstock-1"}
        stolen = machines.node / "stolen.pem"
        shutil.copy(machines.node / "admin.pem", stolen)
        machines.run("head", "penstock down --dir fleet")
        (removed,) = re.findall(
            r"`penstock down`, remove `([\w.]+)` and `([\w.]+)`, `penstock up`", SECURITY.read_text()
        )
        for file in removed:
            (machines.head / "fleet" / file).unlink()
        machines.run("head", up)
        assert refused(machines, status, "certificate")
        copied()
        until(lambda: set(machines.workers(status)) == {"far", "penstock-1"}, 60)
        assert machines.run("node", train) == f"{numbers(0)}\n"
        put(stolen, stolen.read_text() + parts_of(machines.node / "client.pem")[1])
        assert refused(machines, status.replace("admin.pem", "stolen.pem"), "certificate"), "the new CA is no secret"
    finally:
        machines.run("head", "penstock down --dir fleet")


# --------------------------------------------------------------------------------------------------------------- Slurm

SRUN = """#!/bin/bash
trap : TERM # it ends with its tasks
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 $HEAD "$@" &
SLURM_PROCID=1 $NODE "$@" &
while [ -n "$(jobs -pr)" ]; do wait; done
"""
"""Replaces Slurm's srun: a task on each node."""


def test_slurm_with_tls(machines: Machines) -> None:
    """service.sbatch and train.sbatch with the settings of the page, and files that openssl made. No clear text."""
    shared, programs = machines.head.with_name("penstock"), machines.node
    shared.mkdir()
    subprocess.run(["bash", "-euo", "pipefail", "-c", OPENSSL], cwd=shared, check=True, capture_output=True)
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    (programs / "named").write_text('#!/bin/sh\nhostname "$1"; shift; exec "$@"\n')
    (programs / "named").chmod(0o755)
    network = machines.network
    nodes = {
        host: [*network.inside(host), "unshare", "--uts", str(programs / "named"), network.addresses[host]]
        for host in ("head", "node")
    }
    (settings,) = (block.text for block in blocks(REPO / "docs/deploy.md") if "sbatch --nodes" in block.text)
    exports = "".join(line + "\n" for line in settings.splitlines() if line.startswith("export "))
    environment = machines.environment | {
        "PATH": f"{programs}:{machines.environment['PATH']}",
        "HOME": str(shared.parent),
        **{host.upper(): " ".join(prefix) for host, prefix in nodes.items()},
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NAME": "penstock",
        "SLURM_CPUS_PER_TASK": "2",
        "PENSTOCK_STATE_DIR": str(shared / "state"),
    }

    def job(template: str, *arguments: str) -> list[str]:
        script = f'{exports.replace("ourpackage.data", "streams")} exec bash {REPO}/deploy/slurm/{template}.sbatch "$@"'
        return [*nodes["head"], "bash", "-c", script, "job", *arguments]

    with subprocess.Popen(job("service"), env=environment, cwd=shared, start_new_session=True) as service:
        try:
            until(lambda: service.poll() is not None or (shared / "address").exists(), 60)
            train = job("train", str(programs / "train.py"))
            trained = subprocess.run(train, env=environment, cwd=shared, stdout=subprocess.PIPE, text=True, timeout=120)
            assert trained.returncode == 0
            assert sorted(trained.stdout.splitlines()) == [str(numbers(0)), str(numbers(2))]
            assert not (shared / "token").exists()
        finally:
            os.killpg(service.pid, signal.SIGTERM)
        assert service.wait(60) == 0
