"""Reduction of the rounds' measurements to one figure: medians, ratios within a round, costs per gigabyte.

A ratio is computed within each round, between two measurements seconds apart, and then its median is taken, because
load that slows the machine for a minute slows both. A missing figure is None throughout, and never omitted silently.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.processes import CONSUMER

__all__ = [
    "RECEIVING",
    "Figures",
    "cpu_us",
    "loss",
    "median",
    "memory_mib",
    "rate",
    "ratio",
    "record_rate",
    "roles_in",
    "shared_files_mib",
    "values",
]

Record = dict[str, Any]
Figures = dict[str, dict[str, list[Record | None]]]
Place = tuple[str, str]
"""Pair of a case and a mode."""

RECEIVING = frozenset((CONSUMER, "receiver"))
"""Roles that run on the training host; all others run at the source of the data, on this host or elsewhere."""


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that exist."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def values(figures: Figures, place: Place, of: Callable[[Record], float]) -> list[float | None]:
    """Return one value for each round."""
    case, mode = place
    records = figures.get(case, {}).get(mode, [])
    return [None if record is None else of(record) for record in records]


def record_rate(record: Record) -> float:
    """Return the batches a second."""
    return float(record["batches"] / record["span_s"])


def rate(figures: Figures, place: Place) -> float | None:
    """Return the batches a second, median of the rounds."""
    return median(values(figures, place, record_rate))


def ratio(figures: Figures, over: Place, under: Place, of: Callable[[Record], float] = record_rate) -> float | None:
    """Return the median of the rounds' ratios."""
    pairs = zip(values(figures, over, of), values(figures, under, of), strict=False)
    return median(above / below for above, below in pairs if above is not None and below)


def loss(figures: Figures, place: Place, base: Place) -> float | None:
    """Return the share of the base's rate by which the other is slower; below 0 if it is faster."""
    kept = ratio(figures, place, base)
    return None if kept is None else 1 - kept


def cpu_us(roles: Iterable[str] | None) -> Callable[[Record], float]:
    """Return a function for the processor microseconds a batch of these roles; None: of all that do not receive."""
    chosen = None if roles is None else frozenset(roles)

    def of(record: Record) -> float:
        used: dict[str, float] = record["cpu_s"]
        seconds = sum(
            spent for role, spent in used.items() if (role not in RECEIVING if chosen is None else role in chosen)
        )
        return float(1e6 * seconds / record["batches"])

    return of


def memory_mib(record: Record) -> float:
    """Return the sum over all processes of the mode."""
    return float(sum(entry["pss"] for entry in record["memory"].values()))


def shared_files_mib(record: Record) -> float:
    """Return the part in mapped files, mostly libraries."""
    return float(sum(entry["files"] for entry in record["memory"].values()))


def roles_in(records: Sequence[Record | None]) -> list[str]:
    """Return all roles, in the order of their cost in the first round."""
    first = next((record for record in records if record is not None), None)
    return sorted(first["cpu_s"], key=lambda role: -first["cpu_s"][role]) if first else []
