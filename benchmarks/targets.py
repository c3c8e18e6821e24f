"""Targets and verdicts: each target with its figure.

If a target has no figure, because a peer (another library) is missing or failed, it is reported as not measured. A
missed target is reported with its figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import RECEIVING, Figures, cpu_us, loss, median, rate, ratio, values
from benchmarks.modes import ALONE, DATALOADER, MEMCPY, PENSTOCK, RAW_TCP, TCP, TF

__all__ = ["TARGETS", "Target", "Verdict", "judge"]

Results = dict[str, Any]
"""Results of full_path.py, as it writes them in JSON: a key for each suite, and keys for the conditions of the run."""


@dataclass(frozen=True)
class Target:
    suite: str
    what: str
    wanted: float
    find: Callable[[Any], float | None]
    """Function that takes the target's figure from the figures of its suite."""
    shape: str = "{:,.0f}/s"
    """Format string for the figure in the report."""
    at_most: bool = False


@dataclass(frozen=True)
class Verdict:
    suite: str
    what: str
    wanted: str
    found: str
    met: bool | None
    """True if the target is met, False if it is missed, None if it could not be measured."""

    @property
    def word(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


RATIO, PERCENT, MICROSECONDS = "{:.2f}", "{:.1%}", "{:.1f} us"


def _rate(case: str, mode: str, wanted: float) -> Target:
    return Target("path", f"{mode}, {case}", wanted, lambda f: rate(f, (case, mode)))


def _times(case: str, mode: str, other: str, wanted: float, shape: str = "{:.2f}x") -> Target:
    what = f"{mode}, {case}, to {other}"
    return Target("path", what, wanted, lambda f: ratio(f, (case, mode), (case, other)), shape)


def _receiver(case: str) -> Target:
    """Return the target for the processor time on the training host, of the training process and its receiver together,
    with one case."""
    of = cpu_us(RECEIVING)
    what = f"{TCP}, {case}, receiver's processor time per GB, to raw TCP's receiver"
    return Target("path", what, 1.5, lambda f: ratio(f, (case, TCP), (case, RAW_TCP), of), RATIO, at_most=True)


def _thread_us(record: dict[str, Any]) -> float:
    return float(1e6 * record["thread_s"] / record["batches"])


def _loss(what: str, case: str, base: str) -> Target:
    def find(figures: Figures) -> float | None:
        return loss(figures, (case, PENSTOCK), (base, PENSTOCK))

    return Target("snapshots", what, 0.05, find, PERCENT, at_most=True)


def _slots(count: int) -> Target:
    def find(figures: dict[str, list[dict[str, Any] | None]]) -> float | None:
        return median(None if record is None else record["share"] for record in figures.get(str(count), []))

    return Target("slots", f"{count} slots that sleep 20 ms a batch, of the sum of their rates", 0.95, find, RATIO)


def _slow(case: str, mode: str) -> Target:
    what = f"{mode}, source of {case} a batch, to the source alone"
    return Target("slow", what, 0.97, lambda f: ratio(f, (case, mode), (case, ALONE)), "{:.3f}")


DICT = "dict of 8 x 8 KiB"
CLOCK, WORK = "2 ms by the clock", "2 ms of work"

TARGETS = (
    _times("8 MiB", PENSTOCK, MEMCPY, 0.8, RATIO),
    _times("8 MiB", PENSTOCK, DATALOADER, 15),
    _rate("1 MiB", PENSTOCK, 18_000),
    _times("1 MiB", PENSTOCK, DATALOADER, 15),
    _rate("64 KiB", PENSTOCK, 60_000),
    _times("64 KiB", PENSTOCK, DATALOADER, 25),
    Target(
        "path",
        f"{PENSTOCK}, 64 KiB, the training thread's processor time a batch",
        15,
        lambda f: median(values(f, ("64 KiB", PENSTOCK), _thread_us)),
        MICROSECONDS,
        at_most=True,
    ),
    _rate("4 KiB", PENSTOCK, 70_000),
    _rate(DICT, PENSTOCK, 15_000),
    _times("8 MiB", TCP, RAW_TCP, 0.85, RATIO),
    _times("1 MiB", TCP, RAW_TCP, 0.85, RATIO),
    _times("8 MiB", TCP, TF, 2.2),
    _times("1 MiB", TCP, TF, 3),
    _receiver("8 MiB"),
    _receiver("1 MiB"),
    _rate("64 KiB", TCP, 18_000),
    _times("64 KiB", TCP, TF, 4),
    _rate("4 KiB", TCP, 30_000),
    _loss("snapshots at the default cadence, state of 1 KiB, 1 MiB batches, loss", "1 KiB", "no state"),
    _loss("the same with a state of 100 x 1 KiB, loss", "100 x 1 KiB", "no state"),
    _loss("a snapshot at every step, source of 2 ms, loss", "1 KiB, every step, 2 ms", "no state, 2 ms"),
    _slots(16),
    _slots(64),
    _slow(CLOCK, PENSTOCK),
    _slow(CLOCK, TCP),
    _slow(WORK, PENSTOCK),
    _slow(WORK, TCP),
)


def judge(results: Results) -> list[Verdict]:
    """Return a verdict (met, missed or not measured) on each target of the suites that were run."""
    verdicts = []
    for target in TARGETS:
        if target.suite not in results:
            continue
        found = target.find(results[target.suite])
        bound = "at most" if target.at_most else "at least"
        met = None if found is None else found <= target.wanted if target.at_most else found >= target.wanted
        verdicts.append(
            Verdict(
                target.suite,
                target.what,
                f"{bound} {target.shape.format(target.wanted)}",
                "-" if found is None else target.shape.format(found),
                met,
            )
        )
    return verdicts
