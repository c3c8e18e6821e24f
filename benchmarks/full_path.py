"""Speed of Penstock's whole public path, from a loader in a worker to the training loop, compared with other libraries
(peers) in one run on one machine.

    python -m benchmarks.full_path [--suite path|snapshots|slots|slow|all] [--quick] [--write benchmarks/README.md]

Each compared way to deliver batches is a mode. All modes have the same work and take turns within each round; medians
and ratios are reported. benchmarks/README.md has the method, the set-up of the peers and the limits of the figures. The
results go to a folder (--out): results.json with all data of every round, results.md with the tables, results.png, and
the output of each player.

Peers run in Python environments of their own, made by `make bench-peers`. A peer without an environment is named and
left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import PATH, Times
from benchmarks.modes import ROOT, Stage
from benchmarks.processes import adopt_orphans, busy_cores, cpu_s, kill_tree, machine_s, tree
from benchmarks.report import IDLE_CORES, between, markdown
from benchmarks.suites import SUITES, Plan
from benchmarks.targets import judge

__all__ = ["main"]

QUICK = Plan(
    rounds=1,
    state_rounds=1,
    times=Times(warm_s=0.1, span_s=0.2, latency_s=0.05, at_least=5, at_most_s=2.0),
    slow_spans=1,
    slots=(4, 8),
    slots_s=0.5,
)
"""Plan of --quick: durations of a trial run, too short for meaningful figures."""


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--rounds", type=int, help=f"rounds of each case; {Plan().rounds}")
    parser.add_argument("--seconds", type=float, help=f"span of throughput; {Times().span_s:g}")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of their environments")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/out", help="folder for the results")
    parser.add_argument("--write", type=Path, help="put the tables between the two markers of this document")
    return parser.parse_args(given)


def plan_of(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan()
    rounds = options.rounds or plan.rounds
    times = plan.times if options.seconds is None else replace(plan.times, span_s=options.seconds)
    state_rounds = plan.state_rounds if options.rounds is None else rounds
    return replace(plan, rounds=rounds, state_rounds=state_rounds, times=times)


def run(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Run the chosen suites. Return their results, as values that can be written as JSON."""
    options.out.mkdir(parents=True, exist_ok=True)
    noise = {"load_before": os.getloadavg()[0], "busy_before": busy_cores(2.0)}
    if noise["busy_before"] > IDLE_CORES:
        print(f"the machine is not idle: {noise['busy_before']:.2f} cores are busy", file=sys.stderr)
    stage = Stage(options.peers.absolute(), options.out)
    results: dict[str, Any] = {}
    suites_s: dict[str, float] = {}
    started, steal, used = time.monotonic(), machine.steal_s(), machine_s() - _ours_s()
    try:
        for name, suite in SUITES.items():
            if options.suite in (name, "all"):
                begun = time.monotonic()
                results[name] = suite(stage, plan, options.out)
                suites_s[name] = time.monotonic() - begun
        took = time.monotonic() - started
        noise["others"] = max(0.0, machine_s() - _ours_s() - used) / took
    finally:
        stage.close()
        kill_tree(os.getpid(), itself=False)  # no descendant of a player may outlive this process
    noise["steal"] = (machine.steal_s() - steal) / (took * (os.cpu_count() or 1))
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m benchmarks.full_path", *_shown(options)]),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "versions": stage.versions,
        "settings": asdict(plan),
        "sizes": {case.name: case.nbytes for case in PATH},
        "noise": noise,
        "took_s": took,
        "suites_s": suites_s,
        "missing": stage.missing,
        "failures": stage.failures,
        **results,
    }


def _ours_s() -> float:
    """Return the processor seconds that this process and all its descendants, including ended ones, have used so
    far."""
    return sum(map(cpu_s, tree(os.getpid())))


def _shown(options: argparse.Namespace) -> list[str]:
    """Return the command-line options that change the measurement, for the report. Options that name folders are left
    out."""
    shown = ["--quick"] if options.quick else []
    for name in ("suite", "rounds", "seconds"):
        if getattr(options, name) not in (None, "all"):
            shown.append(f"--{name} {getattr(options, name)}")
    return shown


def main(given: list[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a measurement failed, else 0, also if peers are not installed or
    targets are missed."""
    options = arguments(given)
    adopt_orphans()
    results = run(options, plan_of(options))
    text = markdown(results)
    results["targets"] = [asdict(verdict) for verdict in judge(results)]
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "results.md").write_text(text + "\n")
    print(text)
    picture = options.out / "results.png"
    if "path" in results:
        from benchmarks.plot import draw  # importing matplotlib takes a second, and only this suite is plotted

        draw(results, picture)
    if options.write:
        if "path" in results:
            shown = options.write.with_suffix(".png")
            shown.write_bytes(picture.read_bytes())
            text = f"![Batches per second and processor time per GB]({shown.name})\n\n{text}"
        options.write.write_text(between(options.write.read_text(), text))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
