"""Conversion of numbers to text for people, the same on the command line, on the dashboard and in a log."""

from __future__ import annotations

import time

INPUT_BOUND = 0.05
"""Share of its time (0 to 1) that a box must wait for data to be called input-bound."""


def seconds(value: float) -> str:
    """0.4 s, 12 s, 3 min, 2.5 h."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(count: int) -> str:
    """Bytes: 412 B, 3.1 KiB, 2.0 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def rate(value: float) -> str:
    """Steps or batches per second: 0.4, 12.3, 4200."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(share: float) -> str:
    """Share from 0 to 1: 26%."""
    return f"{100 * share:.0f}%"


def clock(at: float) -> str:
    """Time of day, in this machine's time zone, of a Unix time."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def topology(num_boxes: int, num_workers: int) -> str:
    """2 boxes x 1 worker."""
    boxes = "1 box" if num_boxes == 1 else f"{num_boxes} boxes"
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{boxes} x {workers}"
