"""Engine for Slurm: one batch job, with the coordinator on the job's first node and the workers as the tasks of one
step.

The job's script is deploy/slurm/service.sbatch, which is part of the package. The plan's sbatch options and variables
are written into it. The script keeps the daemons running, and Slurm ends them with the job.
"""

from __future__ import annotations

import shlex
import time
from importlib import resources
from pathlib import Path

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.external_commands import called
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.keeper import log_end
from penstock.proto.errors import DeadlineError, PenstockError, UnsafeBindError

__all__ = ["SlurmEngine", "render"]

BEGINNING = "set -euo pipefail\n"
"""First line of the job script after its #SBATCH lines."""
POLL_S = 1.0
"""Seconds between two queries to Slurm's controller. They are few, because many users share the controller."""


def render(plan: FleetPlan, folder: Path) -> str:
    """Return the text of the job script. It sets every variable that the plan decides, to "" if the plan has no value
    for it, so that the same variables in sbatch's environment have no effect."""
    _, beginning, body = resources.files(__package__).joinpath("service.sbatch").read_text().partition(BEGINNING)
    options = {
        "job-name": f"penstock-{plan.name}",
        "ntasks": str(plan.workers),
        "cpus-per-task": str(plan.slots),
        "output": f"{folder / 'logs'}/slurm-%j.log",
        "open-mode": "append",
        "signal": "B:USR1@120",
    }
    insecure = "true" if plan.insecure else ""
    variables = {
        "PENSTOCK_FLEET": plan.name,
        "PENSTOCK_FOLDER": str(folder / "slurm"),
        "PENSTOCK_PORT": plan.listen.rpartition(":")[2],
        "PENSTOCK_STATE_DIR": str(plan.options["state_dir"]),
        "PENSTOCK_TOKEN": "",  # a token here would take precedence over the file
        "PENSTOCK_TOKEN_FILE": plan.token_file,
        "PENSTOCK_COORDINATOR_INSECURE": insecure,
        "PENSTOCK_WORKER_INSECURE": insecure,
        "PENSTOCK_WORKER_SLOTS": str(plan.slots),
        "PENSTOCK_WORKER_ALLOW": plan.allow,
        "PENSTOCK_WORKER_RUNNER_MEMORY": plan.runner_memory,
        **{f"PENSTOCK_TLS_{name}": plan.tls.get(f"tls_{name.lower()}", "") for name in ("CA", "CERT", "KEY", "NAME")},
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --requeue",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "",
    ]
    return "\n".join(lines) + beginning + body


class SlurmEngine:
    """Engine that submits a fleet as a Slurm job, and cancels the job."""

    def up(self, plan: FleetPlan, folder: Path) -> Fleet:
        """Submit the job and return when the coordinator listens. If the job is already queued or runs, submit none.

        Raises DeadlineError if the coordinator does not listen in time (the job stays queued), PenstockError if the job
        ended, UnsafeBindError if the fleet would have no TLS.
        """
        where = FleetFolder(folder)
        if not plan.insecure and not plan.tls.get("tls_cert"):
            raise UnsafeBindError(
                "--tls-cert, --tls-key and --tls-ca must be given, because workers and training jobs on other nodes "
                "connect over the network. On a network that you trust, pass --insecure instead"
            )
        fleet, before = where.fleet(), where.plan()
        if fleet is not None and _state(fleet.about["job"]):
            if before is None or before.differences(plan):
                raise CommandError(
                    f"Slurm job {fleet.about['job']} runs this fleet with other settings. End it by `penstock down` "
                    "first",
                    USAGE,
                )
        else:
            job = self._submit(plan, where)
            fleet = Fleet("slurm", plan.name, str(where.path), "", plan.token_file, plan.tls, {"job": job})
            where.save_plan(plan)
            where.save(fleet)
        return self._wait(plan, where, fleet)

    def _submit(self, plan: FleetPlan, where: FleetFolder) -> str:
        (where.path / "slurm" / "address").unlink(missing_ok=True)
        script = where.path / "fleet.sbatch"
        script.write_text(render(plan, where.path))
        more = shlex.split(str(plan.options["sbatch"]))
        return called(["sbatch", "--parsable", *more, str(script)]).strip().split(";")[0]

    def _wait(self, plan: FleetPlan, where: FleetFolder, fleet: Fleet) -> Fleet:
        deadline, job = time.monotonic() + plan.timeout_s, fleet.about["job"]
        address = where.path / "slurm" / "address"
        while True:
            state = _state(job)
            if state == "RUNNING" and address.exists():
                found = address.read_text().strip()
                return Fleet("slurm", plan.name, str(where.path), found, plan.token_file, plan.tls, {"job": job})
            if not state:
                where.forget()
                raise PenstockError(f"Slurm job {job} has ended: {log_end(where.logs / f'slurm-{job}.log')}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Slurm job {job} is still {state} after {plan.timeout_s:g} s, and stays queued. Run the same "
                    "command again to wait for the job, or cancel it by `penstock down`"
                )
            time.sleep(POLL_S)

    def down(self, fleet: Fleet, timeout_s: float) -> list[str]:
        """Cancel the job and return when it has ended."""
        job = fleet.about["job"]
        if not _state(job):
            return []
        called(["scancel", job])
        deadline = time.monotonic() + timeout_s
        while _state(job):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Slurm job {job} has not ended {timeout_s:g} s after scancel. See `squeue --job {job}`"
                )
            time.sleep(POLL_S)
        return [f"job {job}"]


def _state(job: str) -> str:
    """Return Slurm's word for the state of a job, such as PENDING or RUNNING; "" if the job has ended. Raises
    PenstockError if squeue cannot tell, for example because Slurm's controller does not answer."""
    try:
        state = called(["squeue", "--noheader", "--jobs", job, "--format", "%T"]).strip()
    except PenstockError as error:
        if "Invalid job id" in error.message:  # the job ended some time ago, and squeue no longer lists it
            return ""
        raise
    return state if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED") else ""
