"""Report of benchmarks/fleet.py as a Markdown table, with a column for each size of the fleet, and verdicts on the
targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.report import table
from benchmarks.targets import Verdict

__all__ = ["BEGIN", "END", "Record", "find", "judge", "markdown"]

BEGIN = "<!-- fleet: begin (written by benchmarks/fleet.py --write) -->"
END = "<!-- fleet: end -->"
FULL = 10_000
"""Number of workers of the fleet for which the targets hold."""

Record = dict[str, Any]
"""Results of benchmarks/fleet_load.py for one size of the fleet: a nested dict."""


def find(record: Record | None, *path: str) -> float | None:
    """Return the figure that the keys `path` lead to in a record; None if it was not measured."""
    here: Any = record
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    return None if here is None else float(here)


@dataclass(frozen=True)
class Row:
    what: str
    path: tuple[str, ...]
    shape: str
    times: float = 1.0


MS, MIB, PER_S, SECONDS = "{:,.1f} ms", "{:,.0f} MiB", "{:,.0f}/s", "{:,.2f} s"

ROWS = (
    Row("all registered after", ("register", "span_s"), SECONDS),
    Row("open to assignment, p50", ("open", "to_assignment_s", "p50"), SECONDS),
    Row("open to assignment, p99", ("open", "to_assignment_s", "p99"), SECONDS),
    Row("all assignments out after", ("open", "assigned_s"), SECONDS),
    Row("all boxes see all slots READY after", ("open", "settled_s"), SECONDS),
    Row("steady: heartbeats", ("steady", "beats_per_s"), PER_S),
    Row("steady: watches of boxes", ("steady", "watches_per_s"), PER_S),
    Row("steady: a heartbeat takes, p50", ("steady", "heartbeat_s", "p50"), MS, 1e3),
    Row("steady: a heartbeat takes, p99", ("steady", "heartbeat_s", "p99"), MS, 1e3),
    Row("steady: longest time between two of a worker", ("steady", "longest_gap_s"), SECONDS),
    Row("steady: coordinator, cores", ("steady", "cores"), "{:.2f}"),
    Row("steady: generator, cores", ("steady", "generator_cores"), "{:.2f}"),
    Row("steady: coordinator's memory", ("steady", "rss_mib"), MIB),
    Row("a slot that moves: to assignment, p50", ("moves", "to_assignment_s", "p50"), MS, 1e3),
    Row("a slot that moves: to assignment, p99", ("moves", "to_assignment_s", "p99"), MS, 1e3),
    Row("`penstock status`, p50", ("status", "took_s", "p50"), MS, 1e3),
    Row("state of all, 1 KiB each: first record, p50", ("state_small", "first_s", "p50"), SECONDS),
    Row("state of all, 1 KiB each: last record, p50", ("state_small", "last_s", "p50"), SECONDS),
    Row("state of all, 1 KiB each: last record, p99", ("state_small", "last_s", "p99"), SECONDS),
    Row("meanwhile a heartbeat takes, p99", ("state_small", "heartbeat_s", "p99"), MS, 1e3),
    Row("state of all, 76 kB each: first record, p50", ("state_large", "first_s", "p50"), SECONDS),
    Row("state of all, 76 kB each: last record, p50", ("state_large", "last_s", "p50"), SECONDS),
    Row("state of all, 76 kB each: last record, p99", ("state_large", "last_s", "p99"), SECONDS),
    Row("meanwhile a heartbeat takes, p99", ("state_large", "heartbeat_s", "p99"), MS, 1e3),
    Row("meanwhile the coordinator's memory at most", ("state_large", "peak_mib"), MIB),
    Row("snapshots of 76 kB: a second", ("snapshots", "snapshots_per_s"), PER_S),
    Row("snapshots of 76 kB: bytes a second", ("snapshots", "bytes_per_s"), "{:,.1f} MB/s", 1e-6),
    Row("meanwhile a heartbeat takes, p50", ("snapshots", "heartbeat_s", "p50"), MS, 1e3),
    Row("meanwhile a heartbeat takes, p99", ("snapshots", "heartbeat_s", "p99"), MS, 1e3),
    Row("meanwhile the coordinator's memory at most", ("snapshots", "peak_mib"), MIB),
    Row("restart: takes calls after", ("restart", "ready_s"), SECONDS),
    Row("restart: all workers are back after", ("restart", "all_back_s"), SECONDS),
    Row("restart: slots that were moved by it", ("restart", "lost"), "{:,.0f}"),
)


@dataclass(frozen=True)
class Target:
    what: str
    wanted: float
    path: tuple[str, ...]
    shape: str
    times: float = 1.0
    at_least: bool = False


TARGETS = (
    Target("10,000 workers: heartbeats held", FULL / 5, ("steady", "beats_per_s"), PER_S, at_least=True),
    Target("10,000 workers: a heartbeat, p99", 100, ("steady", "heartbeat_s", "p99"), MS, 1e3),
    Target("the same while states of 76 kB are gathered", 100, ("state_large", "heartbeat_s", "p99"), MS, 1e3),
    Target("the same while snapshots of 76 kB come in", 100, ("snapshots", "heartbeat_s", "p99"), MS, 1e3),
    Target("memory, steady", 1024, ("steady", "rss_mib"), MIB),
    Target("memory at most, states of 76 kB", 1024, ("state_large", "peak_mib"), MIB),
    Target("memory at most, snapshots of 76 kB", 1024, ("snapshots", "peak_mib"), MIB),
    Target("slots lost without a fault", 0, ("lost",), "{:,.0f}"),
)


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each target, from the results of the fleet with FULL workers."""
    record = next((found for found in results["sizes"] if found["workers"] == FULL), None)
    verdicts = []
    for target in TARGETS:
        value = find(record, *target.path)
        found = None if value is None else value * target.times
        met = None if found is None else found >= target.wanted if target.at_least else found <= target.wanted
        bound = "at least" if target.at_least else "at most"
        wanted = f"{bound} {target.shape.format(target.wanted)}"
        figure = "-" if found is None else target.shape.format(found)
        verdicts.append(Verdict("fleet", target.what, wanted, figure, met))
    return verdicts


def markdown(results: dict[str, Any]) -> str:
    """Return the report as Markdown, without the picture."""
    machine, noise = results["machine"], results["noise"]
    where = (
        f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}; coordinator, generator and probe share it."
    )
    others = (
        f"Others: {noise['busy_before']:.2f} cores were busy before the run began (load {noise['load_before']:.1f}); "
        f"other programs used {noise['others']:.2f} cores meanwhile."
    )
    lines = [
        where,
        f"Command: `{results['command']}`, {results['date']}, commit {results['commit'] or 'unknown'}.",
        others,
    ]
    if max(noise["busy_before"], noise["others"]) > 0.2:
        lines.append("**The machine was not idle: times are those of a machine with less than two cores.**")
    lines += [f"Failed: {failure}." for failure in results["failures"]]
    head = ("", *(f"{record['workers']:,} workers" for record in results["sizes"]))
    rows = []
    for row in ROWS:
        values = [find(record, *row.path) for record in results["sizes"]]
        rows.append([row.what, *("-" if v is None else row.shape.format(v * row.times) for v in values)])
    verdicts = [[v.what, v.wanted, v.found, v.word] for v in judge(results)]
    connection = results["connection"]
    parts = ["\n".join(f"- {line}" for line in lines), table(head, rows)]
    if connection is not None:
        parts.append(
            f"A connection of its own, with a long poll open on it, costs the coordinator "
            f"{connection['kib_each']:.0f} KiB (measured over {connection['connections']:,})."
        )
    parts.append(table(("target", "wanted", "found", ""), verdicts))
    return "\n\n".join(parts)
