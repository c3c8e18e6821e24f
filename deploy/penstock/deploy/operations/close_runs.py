"""Implementation of `penstock run close`: ends the open attempts of a run or a job at its coordinator."""

from __future__ import annotations

import json

from penstock.deploy.console.coordinator_options import Peer
from penstock.runtime.telemetry.logs import printable

__all__ = ["close_runs"]


def close_runs(name: str, peer: Peer, as_json: bool) -> None:
    """End the run (JOB/ORDINAL), or all runs of the job (JOB), and print what was ended. Raises UnknownRunError."""
    with peer.client() as client:
        runs = client.end_run(name).runs
    if as_json:
        print(json.dumps([{"run": run.run, "attempt": run.attempt, "was_open": run.was_open} for run in runs]))
        return
    for run in runs:
        if run.was_open:
            print(printable(f"run {run.run} is closed: attempt {run.attempt} was ended"))
        else:
            print(printable(f"run {run.run} had been closed before"))
