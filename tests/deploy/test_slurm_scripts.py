"""Slurm's scripts with programs of their names in the place of the real ones: what they do when a daemon ends.
`make slurm` runs the templates on a real Slurm."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import until

SERVICE = Path(__file__).parents[2] / "deploy" / "slurm" / "service.sbatch"
PENSTOCK = """#!/bin/bash
# The coordinator's ends are in $FAKE/ends, one code a start; without one it goes on. A worker's in
# $FAKE/worker_ends.
trap 'exit 0' TERM
if [ "$1" = worker ]; then
    echo "$*" >> "$FAKE/workers"
    read -r code < "$FAKE/worker_ends" && sed -i 1d "$FAKE/worker_ends" && exit "$code"
elif [ "$1" = coordinator ]; then
    echo "$*" >> "$FAKE/starts"
    echo "$PENSTOCK_COORDINATOR_STATE_DIR" >> "$FAKE/state"
    while [ "$1" != --ready-file ]; do [ "$1" != --listen ] || listen=$2; shift; done
    echo "${listen%:0}:4711" | sed 's/:4711:4711/:4711/' > "$2"
    read -r code < "$FAKE/ends" && sed -i 1d "$FAKE/ends" && { sleep 0.3; exit "$code"; }
fi
while :; do sleep 0.05; done
"""
SRUN = """#!/bin/bash
echo $$ >> "$FAKE/steps"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
SCANCEL = """#!/bin/bash
while read -r step; do kill -TERM "$step" 2>/dev/null; done < "$FAKE/steps"
"""


def programs(folder: Path, *ends: int) -> dict[str, str]:
    """The environment of a job that finds them."""
    (folder / "bin").mkdir()
    for name, text in (("penstock", PENSTOCK), ("srun", SRUN), ("scancel", SCANCEL)):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    (folder / "ends").write_text("".join(f"{code}\n" for code in ends))
    (folder / "worker_ends").touch()
    search = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "penstock"}
    return {**os.environ, "PATH": search, "FAKE": str(folder), "PENSTOCK_FOLDER": str(folder / "penstock"), **names}


def run(script: Path, environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", script, *command], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [13, 14])
def test_failed_coordinator_ends_job_with_code(tmp_path: Path, code: int) -> None:
    done = run(SERVICE, programs(tmp_path, code))
    assert done.returncode == code, done.stderr
    assert f"the coordinator is gone (status {code})" in done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == 1, "another try would not help"
    secret = hashlib.sha256((tmp_path / "penstock/token").read_bytes()).hexdigest()[:24]
    where = (tmp_path / "state").read_text().strip()
    assert where == f"/var/tmp/penstock-{secret}/penstock-7", "a name that no other user of the node can take first"


def test_service_keeps_its_coordinator_address(tmp_path: Path) -> None:
    until_again = 'while [ "$(wc -l < $FAKE/starts)" -lt 2 ]; do sleep 0.1; done'
    done = run(SERVICE, programs(tmp_path, 137), "sh", "-c", until_again)
    assert done.returncode == 0, done.stderr
    assert "ended with status 137; starting it again in 1 s" in done.stderr
    first, again = (tmp_path / "starts").read_text().splitlines()
    assert ":0 --ready-file" in first
    assert ":4711 --ready-file" in again


def test_a_dead_worker_is_started_again(tmp_path: Path) -> None:
    """Restart a worker under its name until it is stopped; the job ends with the last one."""
    environment = programs(tmp_path)
    (tmp_path / "worker_ends").write_text("137\n0\n")
    done = run(SERVICE, environment)
    assert done.returncode == 0, done.stderr
    assert "work: ended with status 137; starting it again in 1 s" in done.stderr
    first, again = (tmp_path / "workers").read_text().splitlines()
    assert first == again
    assert "--name penstock-7-1 --listen " in first


def test_a_service_for_a_command_has_its_code(tmp_path: Path) -> None:
    assert run(SERVICE, programs(tmp_path), "sh", "-c", "exit 7").returncode == 7


TWO_TASKS = """#!/bin/bash
trap : TERM # it ends with its tasks
while [[ $1 == --* ]]; do shift; done
for n in 0 1; do SLURM_PROCID=$n "$@" & done
while [ -n "$(jobs -pr)" ]; do wait; done
"""
"""Replace Slurm's srun: two tasks, here."""


def test_job_script_runs_and_ends_daemons(shell: Any, tmp_path: Path) -> None:
    """The real script and real daemons, but for srun. A killed worker comes back; SIGTERM ends all, as scancel does."""
    programs, folder = tmp_path / "bin", tmp_path / "shared"
    for made in (programs, folder):
        made.mkdir(mode=0o700)
    srun, token, address = programs / "srun", folder / "token", folder / "address"
    for path, text, mode in ((srun, TWO_TASKS, 0o755), (token, "a-token-0123456789", 0o600)):
        path.write_text(text)
        path.chmod(mode)
    environment = shell.env(
        {
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_NTASKS": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "penstock",
            "SLURM_CPUS_PER_TASK": "1",
            "PENSTOCK_FOLDER": str(folder),
            "PENSTOCK_FLEET": "penstock",
            "PENSTOCK_TOKEN": None,
            "PENSTOCK_STATE_DIR": str(tmp_path / "my cluster state"),
            "PENSTOCK_WORKER_ALLOW": "streams",
            "PENSTOCK_COORDINATOR_INSECURE": "true",
            "PENSTOCK_WORKER_INSECURE": "true",
        }
    )
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            ["bash", str(SERVICE)], env=environment, cwd=shell.folder, stderr=log, start_new_session=True
        )
    try:

        def workers() -> dict[str, str]:
            if not address.exists():
                return {}
            asked = ("status", "--json", "--coordinator", address.read_text().strip(), "--token-file", str(token))
            done = shell.call(*asked)
            found = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
            return {one["worker"]: one["tcp_address"] for one in found if one["live"] and not one["draining"]}

        until(lambda: set(workers()) == {"penstock-1", "penstock-2"})
        before = workers()
        os.kill(_process(job.pid, "penstock-2"), signal.SIGKILL)
        until(lambda: set(now := workers()) == set(before) and now["penstock-2"] != before["penstock-2"])
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(60) == 0, (tmp_path / "log").read_text()
        assert not _session(job.pid)
        assert (tmp_path / "my cluster state" / "journal.db").exists()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)


def _session(leader: int) -> dict[int, list[str]]:
    """Command lines of the processes of a session."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
    return found


def _process(session: int, worker: str) -> int:
    (pid,) = [pid for pid, command in _session(session).items() if worker in command and "--name" in command]
    return pid
