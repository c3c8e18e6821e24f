"""Report of benchmarks/readers as Markdown: samples per second, the ratio of ours to theirs with its spread, and the
ratio of the samples for a second of processor time, which other programs on the machine change less."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.readers.pairs import ORDERS
from benchmarks.report import conditions, table
from benchmarks.streaming_report import OURS, Find, Records, median, rate

__all__ = ["BEGIN", "END", "markdown", "per_processor_second", "ratios"]

BEGIN = "<!-- readers: begin (written by benchmarks/readers --write) -->"
END = "<!-- readers: end -->"


def ratios(ours: Records, theirs: Records, find: Find = rate) -> list[float]:
    """Return the figure of each turn of Penstock's reader, divided by that of the other library's turn before it, in
    ascending order."""
    pairs = zip(ours, theirs, strict=True)
    return sorted(find(own) / find(other) for own, other in pairs if own is not None and other is not None)


def per_processor_second(record: dict[str, Any]) -> float:
    """Return the samples that a reader reads for each second of processor time of its process and all its threads."""
    return float(record["samples"] / record["processor_s"])


def markdown(results: dict[str, Any]) -> str:
    parts = [_setting(results)]
    for order in ORDERS:
        rows = [
            [f"{pair}, {kind}", *_cells(found[order], found["peer"])]
            for pair, kinds in results["pairs"].items()
            for kind, found in kinds.items()
            if order in found
        ]
        head = ("", "Penstock", "theirs", "ratio", "(from - to)", "for a processor second")
        parts.append(f"**An epoch {order}: samples/s**\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _cells(by_reader: Mapping[str, Records], peer: str) -> list[str]:
    ours, theirs = by_reader[OURS], by_reader[peer]
    cells = ["-" if (found := median(records, rate)) is None else f"{found:,.0f}" for records in (ours, theirs)]
    compared = ratios(ours, theirs)
    if not compared:
        return [*cells, "-", "-", "-"]
    work = statistics.median(ratios(ours, theirs, per_processor_second))
    spread = f"{compared[0]:.2f} - {compared[-1]:.2f}"
    return [*cells, f"{statistics.median(compared):.2f}x", spread, f"{work:.2f}x"]


def _setting(results: dict[str, Any]) -> str:
    lines = conditions(results, f"{results['rounds']} rounds")
    lines.append(
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(results['versions'].items()))}."
    )
    checked = [found["checked"] for kinds in results["pairs"].values() for found in kinds.values()]
    lines.append(f"The same bytes were read by both readers in {sum(checked)} of {len(checked)} comparisons.")
    lines += [f"Not measured: {name} ({why})." for name, why in results["missing"].items()]
    lines += [f"Failed: {failure}." for failure in results["failures"]]
    return "\n".join(f"- {line}" for line in lines)
