"""Time series of the speed and waits of runs, and of the shares of their sources, so that a newly opened dashboard page
can show the past.

A run has a point for each second of the last ten minutes, and a point for each minute of the last day. The point of a
minute is the mean of its seconds, for shares the last of its seconds. Seconds in which no sample was delivered have no
point of shares. The series are kept in memory only. Their number is limited: runs whose last point is the oldest are
dropped for new ones.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.appliance.model.entities import Attempt, Box, BoxPresence

SECONDS = 600
"""Number of points of a run at intervals of a second: the last ten minutes."""
MINUTES = 24 * 60
"""Number of points of a run at intervals of a minute: the last day."""
RUNS = 64
"""Number of runs whose series are kept: the latest ones."""
BOXES = 64
"""Number of boxes that are read before a sample pauses, so that other tasks run."""

Point = tuple[float, float, float, float]
"""Point of a series: the time in seconds since the Unix epoch; the mean steps/s of the run's boxes; the share of its
time, from 0 to 1, that the box with the longest waits waited for data; the batches/s of all slots together."""
COLUMNS = ("at", "steps_per_s", "waited_share", "batches_per_s")


SHARE_S = 30.0
"""Seconds over which the share of a source is measured."""
SOURCES = 6
"""Number of sources of a run whose shares are shown one by one: those with the most samples when counting began."""
REST = "others"
"""Name under which the shares of all other sources are added up."""


@dataclass
class ShareSeries:
    """Shares of a run's data sources over time: the share that was delivered, and the share that the mixture's weights
    ask for. Shares count tokens if the weights of any source do, else samples."""

    names: list[str] = field(default_factory=list)
    """Names of the sources in the newest point; the last name is REST if there are more than SOURCES. A point from
    before a source was known has fewer shares."""
    of_tokens: bool = False
    imbalance: float = 0.0
    """Cost of the most expensive box's batch in a step, divided by the mean over all boxes; 0 = not measured."""
    seconds: deque[tuple[float, array[float]]] = field(default_factory=lambda: deque(maxlen=SECONDS))
    """Points: the time in seconds since the Unix epoch; the delivered share of each name; the wanted share of each
    name."""
    minutes: deque[tuple[float, array[float]]] = field(default_factory=lambda: deque(maxlen=MINUTES))
    """Points of the last day: the last one of each minute."""
    _counted: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def add(self, at: float, boxes: Iterable[Box]) -> None:
        """Add a point from the counts that all boxes reported. Add nothing if no sample was delivered in the last
        SHARE_S seconds."""
        counts: dict[str, int] = {}
        wanted: dict[str, float] = {}
        self.imbalance = 0.0
        boxes = list(boxes)
        if not self.of_tokens and any(count.wanted_of_tokens for box in boxes for count in box.sources.values()):
            self.of_tokens = True
            self._counted.clear()  # they are numbers of samples
        for box in boxes:
            self.imbalance = max(self.imbalance, box.imbalance)
            for name, count in box.sources.items():
                counts[name] = counts.get(name, 0) + (count.tokens if self.of_tokens else count.samples)
                wanted[name] = max(wanted.get(name, 0.0), count.wanted)
        if not counts:
            return
        while self._counted and self._counted[0][0] < at - SHARE_S:
            self._counted.popleft()
        before = self._counted[0][1] if self._counted else {}
        if any(counts.get(name, 0) < count for name, count in before.items()):  # resumed from an earlier state
            self._counted.clear()
            before = {}
        self._counted.append((at, counts))
        fresh = {name: count - before.get(name, 0) for name, count in counts.items()}
        total = sum(fresh.values())
        if total:
            self._name(counts)
            self._put(at, {name: count / total for name, count in fresh.items()}, wanted)

    def _name(self, counts: dict[str, int]) -> None:
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            if name not in self.names and REST not in self.names:
                self.names.append(name if len(self.names) < SOURCES else REST)

    def _put(self, at: float, shares: dict[str, float], wanted: dict[str, float]) -> None:
        point = array("f")
        for of in (shares, wanted):
            own = [of.get(name, 0.0) for name in self.names if name != REST]
            rest = [max(0.0, sum(of.values()) - sum(own))] if REST in self.names else []
            point.extend((*own, *rest))
        if self.seconds and int(at // 60) != int(self.seconds[-1][0] // 60):
            self.minutes.append(self.seconds[-1])
        self.seconds.append((at, point))

    def caption(self) -> dict[str, Any]:
        """Return what the dashboard page writes above the chart of shares."""
        return {"unit": "tokens" if self.of_tokens else "samples", "imbalance": round(self.imbalance, 3)}

    def as_dict(self) -> dict[str, Any]:
        """Return the series for the dashboard page. A point is [time, delivered shares ..., wanted shares ...]."""
        return {
            "names": self.names,
            **self.caption(),
            "seconds": [_shares(point) for point in self.seconds],
            "minutes": [_shares(point) for point in self.minutes],
        }


def _shares(point: tuple[float, array[float]]) -> list[float]:
    return [round(point[0], 1), *(round(share, 4) for share in point[1])]


@dataclass
class OneRunSeries:
    """Time series of one run: its speed, its waits, and the shares of its data sources."""

    seconds: deque[Point] = field(default_factory=lambda: deque(maxlen=SECONDS))
    minutes: deque[Point] = field(default_factory=lambda: deque(maxlen=MINUTES))
    shares: ShareSeries = field(default_factory=ShareSeries)
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
    """Time series of the latest RUNS runs: speed, waits, and shares of data sources."""

    def __init__(self) -> None:
        self._tracks: OrderedDict[str, OneRunSeries] = OrderedDict()

    def add(self, run: str, point: Point) -> None:
        track = self._tracks.setdefault(run, OneRunSeries())
        self._tracks.move_to_end(run)
        track.add(point)
        while len(self._tracks) > RUNS:
            self._tracks.popitem(last=False)

    def sample(self, attempts: Iterable[Attempt], wall_s: float) -> Iterator[None]:
        """Add a point to the series of each attempt's run, in steps of BOXES boxes. A fleet has 10,000 slots, and the
        event loop must serve other tasks between two steps. `wall_s`: the time, in seconds since the Unix epoch."""
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
            self._tracks[attempt.run].shares.add(wall_s, attempt.boxes.values())

    def newest_shares(self) -> dict[str, dict[str, Any]]:
        """Return the newest shares of each run whose loader counts its sources: a dict with the sources' `names`, the
        `unit` (tokens or samples) and the `point`. Any thread may call this method."""
        found = {}
        for run, track in list(self._tracks.items()):
            shares, points = track.shares, list(track.shares.seconds)[-1:]
            if points:
                found[run] = {"names": list(shares.names), **shares.caption(), "point": _shares(points[0])}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the series for the dashboard page: rows with the columns COLUMNS, oldest first."""
        return {
            "columns": COLUMNS,
            "runs": {
                run: {
                    "seconds": _rows(track.seconds),
                    "minutes": _rows(track.minutes),
                    **({"shares": track.shares.as_dict()} if track.shares.names else {}),
                }
                for run, track in self._tracks.items()
            },
        }


def _made(box: Box) -> float:
    return sum(slot.batches_per_s for slot in box.slots)


def _rows(points: Iterable[Point]) -> list[list[float]]:
    return [[round(at, 1), round(steps, 3), round(waited, 4), round(made, 3)] for at, steps, waited, made in points]
