"""Plot of the results of full_path.py: for each mode (way to deliver batches) its speed at each size of batch, and its
processor time for each gigabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there is no display

from benchmarks.figures import RECEIVING, cpu_us, median, rate, values
from benchmarks.modes import MEMCPY, PENSTOCK, RAW_TCP, TCP
from matplotlib import pyplot as plt

__all__ = ["draw"]

COST_CASE = "1 MiB"
STYLES = {PENSTOCK: ("C0", "-", 2.5), TCP: ("C1", "-", 2.5), MEMCPY: ("0.5", "--", 1.2), RAW_TCP: ("0.5", ":", 1.2)}
"""Colour, line style and width of the lines of some modes, by the mode's name. Other modes have thin lines."""
COLOURS = ("C2", "C3", "C4", "C5", "C6", "C8", "C9")  # C7 is the grey of the floors


def draw(results: dict[str, Any], file: Path) -> None:
    """Write a PNG with the results of the suite "path". `results`: results of full_path.py."""
    figures, sizes = results["path"], results["sizes"]
    cases = {case: size for case, size in sizes.items() if not case.startswith("dict")}
    modes = list(next(iter(figures.values())))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=(3, 2), layout="constrained")
    for number, mode in enumerate(modes):
        points = [(size, rate(figures, (case, mode))) for case, size in cases.items()]
        there = [(size, found) for size, found in points if found is not None]
        if there:
            colour, line, width = STYLES.get(mode, (COLOURS[number % len(COLOURS)], "-", 1.2))
            left.plot(
                *zip(*there, strict=True), line, color=colour, linewidth=width, marker="o", markersize=4, label=mode
            )
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(list(cases.values()), list(cases))
    left.set_xlabel("batch")
    left.set_ylabel("batches per second")
    left.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside lower left", fontsize=8, ncols=5)  # outside the axes, which are full of lines

    measured = [mode for mode in reversed(modes) if rate(figures, (COST_CASE, mode)) is not None]
    costs = {
        side: [
            (median(values(figures, (COST_CASE, mode), cpu_us(roles))) or 0.0) * 1e3 / sizes[COST_CASE]
            for mode in measured
        ]
        for side, roles in (("receiving side", RECEIVING), ("sending side", None))
    }
    start = [0.0] * len(measured)
    for colour, (side, seconds) in zip(("C0", "0.7"), costs.items(), strict=True):
        right.barh(measured, seconds, left=start, color=colour, label=side)
        start = [before + more for before, more in zip(start, seconds, strict=True)]
    right.set_xlabel(f"processor seconds per GB, batches of {COST_CASE}")
    right.tick_params(axis="y", labelsize=8)
    right.legend(fontsize=8)

    machine = results["machine"]
    figure.suptitle(
        f"Ready batches, {machine['cores']} cores of {machine['processor']}, {results['date']}", fontsize=10
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)
