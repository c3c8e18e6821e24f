"""Load of a simulated fleet of workers and boxes on a real coordinator process: how the costs of heartbeats,
assignments, states and snapshots grow with the number of workers.

    python -m benchmarks.fleet --workers 100 1000 10000 --seconds 20

Each size of the fleet has a new coordinator, with its state on disk, and a new process that makes the calls of the
fleet (benchmarks/fleet_load.py). The sizes are measured one after the other. Writes fleet.json, fleet.md and fleet.png;
with --write also puts the table and the picture into a document.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.fleet_report import BEGIN, END, judge, markdown
from benchmarks.modes import ROOT
from benchmarks.processes import busy_cores, cpu_s, machine_s
from benchmarks.report import between

__all__ = ["main", "run"]

SIZES = (100, 1000, 10_000)
DEADLINE_S = 900.0
"""Deadline of the measurement of one size of the fleet, in seconds."""
CONNECTIONS = 1000


def _load(arguments: Sequence[str], failures: list[str]) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.fleet_load", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        failures.append(f"{' '.join(arguments)}: no result within {DEADLINE_S:.0f} s")
        return None
    if done.returncode:
        failures.append(f"{' '.join(arguments)}: exit status {done.returncode}")
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _with_cores(record: dict[str, Any]) -> dict[str, Any]:
    for phase in record.values():
        if isinstance(phase, dict) and "span_s" in phase:
            phase["cores"] = phase["coordinator_cpu_s"] / phase["span_s"]
            phase["generator_cores"] = phase["generator_cpu_s"] / phase["span_s"]
    return record


def run(workers: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure all sizes of the fleet, each phase for `seconds` seconds. Return all results, which are written to
    fleet.json."""
    failures: list[str] = []
    load, busy = os.getloadavg()[0], busy_cores(2.0)
    used, started = machine_s(), time.monotonic()
    sizes = []
    for count in workers:
        record = _load(["--workers", str(count), "--seconds", str(seconds)], failures)
        if record is not None:
            failures += [f"{count} workers: {failure}" for failure in record["failures"]]
            sizes.append(_with_cores(record))
    connection = _load(["--workers", "2", "--connections", str(CONNECTIONS)], failures)
    took = time.monotonic() - started
    ours = cpu_s(os.getpid())  # including ended children that were waited for
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m benchmarks.fleet --workers {' '.join(map(str, workers))} --seconds {seconds:g}",
        "commit": machine.commit(),
        "machine": machine.describe(),
        "noise": {"busy_before": busy, "load_before": load, "others": max(0.0, machine_s() - used - ours) / took},
        "took_s": took,
        "sizes": sizes,
        "connection": connection,
        "failures": failures,
    }


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a measurement failed, else 0. A missed target is reported, but
    does not change the status."""
    parser = argparse.ArgumentParser("python -m benchmarks.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="sizes, 10 workers to a box")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of the steady phases")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out")
    parser.add_argument("--write", type=Path, help="also put table and picture into this document")
    options = parser.parse_args(given)
    options.out.mkdir(parents=True, exist_ok=True)
    results = run(options.workers, options.seconds)
    results["targets"] = [asdict(verdict) for verdict in judge(results)]
    text = markdown(results)
    (options.out / "fleet.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "fleet.md").write_text(text + "\n")
    picture = options.out / "fleet.png"
    from benchmarks.fleet_plot import draw  # importing matplotlib takes a second

    draw(results, picture)
    print(text)
    if options.write:
        shown = options.write.with_name("fleet.png")
        shown.write_bytes(picture.read_bytes())
        text = f"![How a fleet's figures grow]({shown.name})\n\n{text}"
        options.write.write_text(between(options.write.read_text(), text, BEGIN, END))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
