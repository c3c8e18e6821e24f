"""Plot of the figures of benchmarks/fleet.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there is no display

from benchmarks.fleet_report import Record, find
from matplotlib import pyplot as plt

__all__ = ["draw"]


def draw(results: dict[str, Any], file: Path) -> None:
    """Write a PNG with four plots, which show how figures grow with the number of workers. `results`: results of
    benchmarks/fleet.py."""
    sizes = results["sizes"]
    counts = [record["workers"] for record in sizes]
    groups: list[tuple[str, list[tuple[str, Callable[[Record], float | None]]]]] = [
        (
            "a heartbeat, p99, ms",
            [
                (name, lambda r, p=phase: _times(find(r, p, "heartbeat_s", "p99"), 1e3))  # type: ignore[misc]
                for name, phase in (
                    ("steady", "steady"),
                    ("snapshots of 76 kB", "snapshots"),
                    ("states of 76 kB", "state_large"),
                )
            ],
        ),
        (
            "seconds",
            [
                ("all assignments of a start", lambda r: find(r, "open", "assigned_s")),
                ("state of all, 1 KiB", lambda r: find(r, "state_small", "last_s", "p50")),
                ("state of all, 76 kB", lambda r: find(r, "state_large", "last_s", "p50")),
                ("all back after a restart", lambda r: find(r, "restart", "all_back_s")),
            ],
        ),
        (
            "coordinator's memory, MiB",
            [
                ("steady", lambda r: find(r, "steady", "rss_mib")),
                ("at most, states of 76 kB", lambda r: find(r, "state_large", "peak_mib")),
                ("at most, snapshots of 76 kB", lambda r: find(r, "snapshots", "peak_mib")),
            ],
        ),
        (
            "steady: cores",
            [
                ("coordinator", lambda r: find(r, "steady", "cores")),
                ("generator", lambda r: find(r, "steady", "generator_cores")),
            ],
        ),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, groups, strict=True):
        for name, of in lines:
            points = [(count, of(record)) for count, record in zip(counts, sizes, strict=True)]
            there = [(count, value) for count, value in points if value]
            if there:
                axis.plot(*zip(*there, strict=True), marker="o", label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("workers")
        axis.set_ylabel(title)
        axis.grid(True, which="major", alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    machine = results["machine"]
    figure.suptitle(f"A fleet of workers, {machine['cores']} cores of {machine['processor']}, {results['date']}")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
