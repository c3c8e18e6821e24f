"""Slurm's script with real daemons and a program in the place of Slurm's srun: what it does when a daemon ends.
`make slurm` runs the templates on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import until

from penstock.proto.rpc.credentials.roles import ROLES
from penstock.proto.rpc.credentials.tokens import Tokens

SERVICE = Path(__file__).parents[2] / "deploy" / "slurm" / "service.sbatch"
TWO_TASKS = """#!/bin/bash
trap : TERM # it ends with its tasks
while [[ $1 == --* ]]; do shift; done
for n in 0 1; do SLURM_PROCID=$n "$@" & done
while [ -n "$(jobs -pr)" ]; do wait; done
"""
"""Replace Slurm's srun: two tasks, here."""

FAKES = {
    "penstock": """#!/bin/bash
trap 'exit 0' TERM
if [ "$1" = coordinator ]; then
    echo start >> "$FAKES/starts"
    while [ "$1" != --ready-file ]; do shift; done
    echo 127.0.0.1:4711 > "$2"
    sleep 0.3
    exit 14
fi
while :; do sleep 0.05; done
""",
    "srun": """#!/bin/bash
echo $$ > "$FAKES/step"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
""",
    "scancel": """#!/bin/bash
kill -TERM "$(< "$FAKES/step")"
""",
}
"""Replace Penstock and Slurm: a worker, and a coordinator whose state cannot be read."""


def test_failed_coordinator_ends_the_job_with_its_code(tmp_path: Path) -> None:
    for name, text in FAKES.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "penstock"}
    folders = {"FAKES": str(tmp_path), "PENSTOCK_FOLDER": str(tmp_path / "own")}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **slurm, **folders, "PATH": path}
    done = subprocess.run(["bash", str(SERVICE)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 14, done.stderr
    assert "the coordinator is gone (status 14)" in done.stderr
    assert (tmp_path / "starts").read_text() == "start\n", "another try would not help"


def test_job_script_runs_and_ends_daemons(shell: Any, tmp_path: Path) -> None:
    """A killed worker comes back, and a killed coordinator at its address; SIGTERM ends all, as scancel does."""
    programs, folder = tmp_path / "bin", tmp_path / "shared"
    for made in (programs, folder):
        made.mkdir(mode=0o700)
    srun, token, address = programs / "srun", folder / "token", folder / "address"
    srun.write_text(TWO_TASKS)
    srun.chmod(0o755)
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
        tokens = Tokens(token.read_text())
        assert len({tokens.of(role) for role in ROLES}) == len(tokens.roles) == len(ROLES)
        assert token.stat().st_mode & 0o777 == 0o600
        os.kill(_process(job.pid, "--name", "penstock-2"), signal.SIGKILL)
        until(lambda: set(now := workers()) == set(before) and now["penstock-2"] != before["penstock-2"])
        told = address.read_text()
        os.kill(_process(job.pid, "coordinator"), signal.SIGKILL)
        until(lambda: set(workers()) == set(before))
        assert address.read_text() == told
        assert "coordinate: ended with status 137; starting it again in 1 s" in (tmp_path / "log").read_text()
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


def _process(session: int, *words: str) -> int:
    (pid,) = [pid for pid, command in _session(session).items() if set(words) <= set(command)]
    return pid
