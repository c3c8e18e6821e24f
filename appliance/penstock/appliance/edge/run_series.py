"""Time series of the speed and waits of runs, so that a newly opened dashboard page can show the past.

A run has a point for each second of the last ten minutes, and a point for each minute of the last day, which is the
mean of its seconds. The series are kept in memory only. Their number is limited: the oldest runs are dropped for new
ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.appliance.model.entities import Attempt, Box, BoxPresence

SECONDS = 600
MINUTES = 24 * 60
RUNS = 64
"""Number of runs whose series are kept: the latest ones."""
BOXES = 64
"""Number of boxes read in one step of a sample."""

Point = tuple[float, float, float, float]
"""Point of a series: the time in seconds since the Unix epoch; the mean steps/s of a box; the largest share of its time
that a box waited; the batches/s that all slots produce."""
COLUMNS = ("at", "steps_per_s", "waited_share", "batches_per_s")


@dataclass
class OneRunSeries:
    """Series of one run."""

    seconds: deque[Point] = field(default_factory=lambda: deque(maxlen=SECONDS))
    minutes: deque[Point] = field(default_factory=lambda: deque(maxlen=MINUTES))
    _minute: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        self.seconds.append(point)
        if self._minute and int(point[0] // 60) != int(self._minute[0][0] // 60):
            count, first = len(self._minute), self._minute[0][0]
            means = [sum(column) / count for column in zip(*(one[1:] for one in self._minute), strict=True)]
            self.minutes.append((first // 60 * 60, means[0], means[1], means[2]))
            self._minute = []
        self._minute.append(point)


class RunSeries:
    """Series of the latest runs."""

    def __init__(self) -> None:
        self._tracks: OrderedDict[str, OneRunSeries] = OrderedDict()

    def add(self, run: str, point: Point) -> None:
        track = self._tracks.setdefault(run, OneRunSeries())
        self._tracks.move_to_end(run)
        track.add(point)
        while len(self._tracks) > RUNS:
            self._tracks.popitem(last=False)

    def sample(self, attempts: Iterable[Attempt], wall_s: float) -> Iterator[None]:
        """Sample all runs, in steps of BOXES boxes: a fleet has 10,000 slots, and the event loop must serve other tasks
        between two steps."""
        looked = 0
        for attempt in attempts:
            steps_per_s = waited = batches_per_s = 0.0
            going = [box for box in attempt.boxes.values() if box.presence is BoxPresence.LIVE and not box.epoch_ended]
            for box in going:
                steps_per_s += box.steps_per_s / len(going)
                waited = max(waited, box.waited_share)
                batches_per_s += _made(box)
                looked += 1
                if looked % BOXES == 0:
                    yield
            self.add(attempt.run, (wall_s, steps_per_s, waited, batches_per_s))

    def as_dict(self) -> dict[str, Any]:
        """Return the series for the dashboard page: rows with the columns COLUMNS, oldest first."""
        return {
            "columns": COLUMNS,
            "runs": {
                run: {"seconds": _rows(track.seconds), "minutes": _rows(track.minutes)}
                for run, track in self._tracks.items()
            },
        }


def _made(box: Box) -> float:
    return sum(slot.batches_per_s for slot in box.slots)


def _rows(points: Iterable[Point]) -> list[list[float]]:
    return [[round(at, 1), round(steps, 3), round(waited, 4), round(made, 3)] for at, steps, waited, made in points]
