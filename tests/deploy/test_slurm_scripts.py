"""Slurm's scripts with programs of their names in the place of the real ones: what they do when a daemon ends.
`make slurm` runs the templates on a real Slurm."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from penstock.deploy.engines import slurm
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.slurm import render

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


def fleet_script(folder: Path) -> Path:
    token = folder / "token"
    token.write_text("secret")
    plan = FleetPlan("slurm", "f", 1, 1, "m", "127.0.0.1:0", str(token), insecure=True, options={"state_dir": ""})
    script = folder / "fleet.sbatch"
    script.write_text(render(plan, folder))
    return script


@pytest.mark.parametrize(("kind", "code"), [("service", 13), ("fleet", 14)])
def test_failed_coordinator_ends_job_with_code(tmp_path: Path, kind: str, code: int) -> None:
    environment = programs(tmp_path, code)
    script = SERVICE if kind == "service" else fleet_script(tmp_path)
    done = run(script, environment)
    assert done.returncode == code, done.stderr
    assert f"the coordinator is gone (status {code})" in done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == 1, "another try would not help"
    token = tmp_path / ("penstock/token" if kind == "service" else "token")
    secret = hashlib.sha256(token.read_bytes()).hexdigest()[:24]
    name = "penstock-7" if kind == "service" else "f"
    where = (tmp_path / "state").read_text().strip()
    assert where == f"/var/tmp/penstock-{secret}/{name}", "a name that no other user of the node can take first"


def test_service_keeps_its_coordinator_address(tmp_path: Path) -> None:
    until_again = 'while [ "$(wc -l < $FAKE/starts)" -lt 2 ]; do sleep 0.1; done'
    done = run(SERVICE, programs(tmp_path, 137), "sh", "-c", until_again)
    assert done.returncode == 0, done.stderr
    assert "ended with status 137; starting it again in 1 s" in done.stderr
    first, again = (tmp_path / "starts").read_text().splitlines()
    assert ":0 --ready-file" in first
    assert ":4711 --ready-file" in again


@pytest.mark.parametrize("kind", ["service", "fleet"])
def test_a_dead_worker_is_started_again(tmp_path: Path, kind: str) -> None:
    """Restart a worker under its name until it is stopped; the job ends with the last one."""
    environment = programs(tmp_path)
    (tmp_path / "worker_ends").write_text("137\n0\n")
    done = run(SERVICE if kind == "service" else fleet_script(tmp_path), environment)
    assert done.returncode == 0, done.stderr
    assert "work: ended with status 137; starting it again in 1 s" in done.stderr
    first, again = (tmp_path / "workers").read_text().splitlines()
    assert first == again
    assert f"--name {'penstock-7' if kind == 'service' else 'f'}-1 --listen " in first


def test_the_engine_fills_in_the_template(tmp_path: Path) -> None:
    _, beginning, body = SERVICE.read_text().partition("set -euo pipefail\n")
    assert fleet_script(tmp_path).read_text().endswith(beginning + body)
    assert (Path(slurm.__file__).parent / "service.sbatch").read_text() == SERVICE.read_text()


def test_the_plan_wins_over_the_environment(tmp_path: Path) -> None:
    named = re.findall(r"^export (PENSTOCK_\w+)=", fleet_script(tmp_path).read_text(), re.MULTILINE)
    documented = set(re.findall(r"^#   (PENSTOCK_[A-Z_]+[A-Z])", SERVICE.read_text(), re.MULTILINE))
    assert documented - {"PENSTOCK_TLS"} <= set(named)
    assert {f"PENSTOCK_TLS_{name}" for name in ("CA", "CERT", "KEY", "NAME")} <= set(named)


def test_service_fails_if_its_coordinator_exits_0(tmp_path: Path) -> None:
    assert run(SERVICE, programs(tmp_path, 0)).returncode == 1


def test_a_service_for_a_command_has_its_code(tmp_path: Path) -> None:
    assert run(SERVICE, programs(tmp_path), "sh", "-c", "exit 7").returncode == 7
