"""Report of benchmarks/sources.py as Markdown, with verdicts on its targets."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report import conditions, table
from benchmarks.targets import Verdict

__all__ = ["BEGIN", "END", "judge", "markdown"]

BEGIN = "<!-- sources: begin (written by benchmarks/sources.py --write) -->"
END = "<!-- sources: end -->"
SEEK_S = 0.010
SNAPSHOT_COST = 0.05
LONG = str(10**9)


def _median(results: dict[str, Any], *path: str) -> float | None:
    found = []
    for figures in results["rounds"]:
        for name in path:
            figures = figures.get(name, {})
        if not isinstance(figures, dict):
            found.append(figures)
    return statistics.median(found) if found else None


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each target: whether Penstock has reached it."""
    seek = _median(results, "seek", LONG, "Penstock")
    verdicts = [
        Verdict("sources", "seek to 90% of 10^9 positions", f"< {SEEK_S * 1e3:.0f} ms", _ms(seek), _below(seek, SEEK_S))
    ]
    costs = {
        **{
            f"map-style, {processes} processes": _median(results, "saved", processes, "Penstock", "cost")
            for processes in results["rounds"][0]["saved"]
        },
        **{
            f"packed, {shards} shards": _median(results, "packed", shards, "saved", "cost")
            for shards in results["rounds"][0]["packed"]
            if shards.isdecimal()
        },
    }
    for name, cost in costs.items():
        found = "-" if cost is None else f"{cost:.1%}"
        what = f"a state at every step costs, {name}"
        verdicts.append(Verdict("sources", what, f"<= {SNAPSHOT_COST:.0%}", found, _below(cost, SNAPSHOT_COST)))
    return verdicts


def _below(value: float | None, limit: float) -> bool | None:
    return None if value is None else value <= limit


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _times(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}x" if value and other else "-"


def markdown(results: dict[str, Any]) -> str:
    """Return the whole report as Markdown: conditions of the run, tables and targets."""
    setting = "\n".join(f"- {line}" for line in conditions(results, f"{len(results['rounds'])} rounds"))
    parts = [setting, _read(results), _seek(results), _packed(results), _sizes(results)]
    rows = [[one.what, one.wanted, one.found, one.word] for one in judge(results)]
    parts.append("**Targets**\n\n" + table(("", "wanted", "found", ""), rows))
    return "\n\n".join(parts)


def _read(results: dict[str, Any]) -> str:
    rows = []
    for processes, makes in results["rounds"][0]["read"].items():
        floor = _median(results, "read", processes, "DataLoader")
        for name in makes:
            plain = _median(results, "read", processes, name)
            saved = _median(results, "saved", processes, name, "rate")
            rows.append([f"{name}, {processes} processes", _number(plain), _times(plain, floor), _number(saved)])
    title = "A shuffled epoch of ready rows of 256 bytes in batches of 64: samples/s"
    return f"**{title}**\n\n" + table(("", "samples/s", "to DataLoader", "with a state at every step"), rows)


def _seek(results: dict[str, Any]) -> str:
    names = ("Penstock", "StatefulDataLoader")
    rows = [
        [f"{int(length):,}", *(_ms(_median(results, "seek", length, name)) for name in names)]
        for length in results["rounds"][0]["seek"]
    ]
    title = "From a state at 90% of a shuffled epoch of so many samples to the batch behind it"
    return f"**{title}**\n\n" + table(("samples", *names), rows)


def _packed(results: dict[str, Any]) -> str:
    floor = _median(results, "packed", "by hand", "plain")
    rows = []
    for shards in results["rounds"][0]["packed"]:
        name = "by hand, in a DataLoader, without a state" if not shards.isdecimal() else f"Penstock, {shards} shards"
        plain = _median(results, "packed", shards, "plain")
        saved = _median(results, "packed", shards, "saved", "rate")
        rows.append([name, _number(plain), _times(plain, floor), _number(saved)])
    title = "Documents of 20 to 2,000 tokens packed into lines of 1,024, in batches of 8: tokens/s of one process"
    return f"**{title}**\n\n" + table(("", "tokens/s", "to by hand", "with a state at every step"), rows)


def _sizes(results: dict[str, Any]) -> str:
    rows = [[name, f"{size:,}"] for name, size in results["sizes"].items()]
    return "**A state in the middle of an epoch, as it is saved**\n\n" + table(("", "bytes"), rows)
