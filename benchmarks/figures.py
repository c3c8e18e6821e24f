"""Reduction of the measurements of all rounds to single figures: medians, ratios within a round, costs. In a round each
mode (compared way to deliver batches) is measured once; the result of one measurement is a record, the dict that
measure.py returns.

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
"""Names of a case (batches to deliver) and a mode (way to deliver them), which together identify a row of
measurements."""

RECEIVING = frozenset((CONSUMER, "receiver"))
"""Roles of the processes that must run on the training host. Processes of other roles make or send the batches, and
could run on another host."""


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are None."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def values(figures: Figures, place: Place, of: Callable[[Record], float]) -> list[float | None]:
    """Return the value of `of` for the record of each round; None for a round without a record."""
    case, mode = place
    records = figures.get(case, {}).get(mode, [])
    return [None if record is None else of(record) for record in records]


def record_rate(record: Record) -> float:
    """Return the batches per second of one measurement."""
    return float(record["batches"] / record["span_s"])


def rate(figures: Figures, place: Place) -> float | None:
    """Return the batches per second of a mode, as the median of the rounds; None if it was not measured."""
    return median(values(figures, place, record_rate))


def ratio(figures: Figures, over: Place, under: Place, of: Callable[[Record], float] = record_rate) -> float | None:
    """Return the ratio of a figure of `over` to that of `under`, as the median of the ratios within each round; None if
    one was not measured."""
    pairs = zip(values(figures, over, of), values(figures, under, of), strict=False)
    return median(above / below for above, below in pairs if above is not None and below)


def loss(figures: Figures, place: Place, base: Place) -> float | None:
    """Return how much slower `place` is than `base`, as a share of the base's batches per second; below 0 if it is
    faster."""
    kept = ratio(figures, place, base)
    return None if kept is None else 1 - kept


def cpu_us(roles: Iterable[str] | None) -> Callable[[Record], float]:
    """Return a function from a record to the processor time for each batch, in microseconds, of all processes of these
    roles. None: of all roles that are not in RECEIVING."""
    chosen = None if roles is None else frozenset(roles)

    def of(record: Record) -> float:
        used: dict[str, float] = record["cpu_s"]
        seconds = sum(
            spent for role, spent in used.items() if (role not in RECEIVING if chosen is None else role in chosen)
        )
        return float(1e6 * seconds / record["batches"])

    return of


def memory_mib(record: Record) -> float:
    """Return the memory of all processes of a mode together, in MiB."""
    return float(sum(entry["pss"] for entry in record["memory"].values()))


def shared_files_mib(record: Record) -> float:
    """Return the part of that memory that is mapped files, mostly libraries, in MiB."""
    return float(sum(entry["files"] for entry in record["memory"].values()))


def roles_in(records: Sequence[Record | None]) -> list[str]:
    """Return the roles of all processes of a mode, that with the most processor time in the first round first."""
    first = next((record for record in records if record is not None), None)
    return sorted(first["cpu_s"], key=lambda role: -first["cpu_s"][role]) if first else []
