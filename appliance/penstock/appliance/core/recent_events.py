"""Recent events, for the dashboard and the event log: a bounded list, lost when the process ends, on which no decision
depends. An event of many slots, such as the loss of a worker with a hundred, is one event with a count."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.logs import about

_log = logging.getLogger("penstock.appliance")

MOST = 256
TOGETHER_S = 5.0
"""Seconds within which a repetition raises an event's count."""
_LOOK_BACK = 8
_TEXT = 400
"""Most characters of an event's text or of a name in it; peers choose parts of both."""

FAULTS = frozenset(
    ("worker lost", "slot lost", "slot failed", "batch quarantined", "box lost", "coordinator restarted")
)
"""Kinds of events that are faults. Others: worker joined, drains, back, left; slot moved, migrated, recovered; box
opened, back, closed; attempt superseded, ended; mixture changed, run restarted."""


@dataclass
class Event:
    kind: str
    text: str
    at: float
    """Monotonic time of the first occurrence, in seconds."""
    wall_s: float
    """Time of the first occurrence, in seconds since the Unix epoch."""
    run: str = ""
    worker: str = ""
    place: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the attempt, box, slot and generation, as far as they apply."""
    count: int = 1


class RecentEvents:
    """List of the latest events, with repetitions counted. `clock`: monotonic; `wall`: seconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._events: deque[Event] = deque(maxlen=MOST)
        self._listener: Callable[[Event], None] = lambda event: None

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with each present event at once, and with later ones; a repetition causes no call."""
        self._listener = listener
        for event in self._events:
            listener(event)

    @property
    def now(self) -> float:
        return self._clock()

    def add(self, kind: str, text: str, *, run: str = "", worker: str = "", **place: int) -> None:
        """Add an event, or count a repetition. `place`: numbers of attempt, box, slot, generation."""
        now = self._clock()
        text, run, worker = text[:_TEXT], run[:_TEXT], worker[:_TEXT]
        for back in range(1, min(_LOOK_BACK, len(self._events)) + 1):
            known = self._events[-back]
            same = (known.kind, known.text, known.run, known.worker) == (kind, text, run, worker)
            if same and now - known.at <= TOGETHER_S:
                known.count += 1
                return
        event = Event(kind, text, now, self._wall(), run, worker, place)
        self._events.append(event)
        self._listener(event)

    def messages(self) -> list[pb.Event]:
        """Return the events for a status reply, oldest first."""
        now = self._clock()
        return [
            pb.Event(
                kind=event.kind,
                fault=event.kind in FAULTS,
                wall_s=event.wall_s,
                age_s=max(0.0, now - event.at),
                text=event.text,
                run=event.run,
                worker=event.worker,
                count=event.count,
            )
            for event in self._events
        ]


def log_event(event: Event) -> None:
    run = f"{event.run}: " if event.run else ""
    named = {"run": event.run, "worker": event.worker}
    extra = about(**event.place, **{name: value for name, value in named.items() if value})
    level = logging.WARNING if event.kind in FAULTS else logging.INFO
    _log.log(level, "%s%s: %s", run, event.kind, event.text, extra=extra)
