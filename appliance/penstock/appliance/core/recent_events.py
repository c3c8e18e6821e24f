"""Recent events, for the dashboard and the event log: a bounded list of faults and changes, which is lost when the
process ends.

An event that many slots have in common, such as the loss of a worker with a hundred slots, is one event with a count.
No decision depends on this list: what must survive is in the journal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.logs import about

_log = logging.getLogger("penstock.appliance")

MOST = 256
"""Number of events that are kept."""
TOGETHER_S = 5.0
"""Seconds within which a repetition of an event raises the event's count, instead of adding an event."""
_LOOK_BACK = 8
_TEXT = 400
"""Largest number of characters of an event's text or of a name in the event. Peers choose parts of both, so both are
bounded."""

FAULTS = frozenset(
    ("worker lost", "slot lost", "slot failed", "batch quarantined", "box lost", "coordinator restarted")
)
"""Kinds of events that are faults. The other kinds are: worker joined, worker drains, worker back, worker left; slot
moved, slot migrated, slot recovered; box opened, box back, box closed; attempt superseded, attempt ended; mixture
changed, run restarted."""


@dataclass
class Event:
    """Fault or change in the cluster, which the dashboard and the log show."""

    kind: str
    text: str
    at: float
    """Monotonic time of the first occurrence, in seconds."""
    wall_s: float
    """Time of the first occurrence, in seconds since the Unix epoch."""
    run: str = ""
    worker: str = ""
    place: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the attempt, box, slot and generation that the event is about; those that do not apply are left
    out."""
    count: int = 1


class RecentEvents:
    """List of the latest events, in which repetitions of an event are counted.

    Args:
        clock: returns monotonic seconds.
        wall: returns seconds since the Unix epoch.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._events: deque[Event] = deque(maxlen=MOST)
        self._listener: Callable[[Event], None] = lambda event: None

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with each event: at once with the present ones, and with later ones when they happen. A
        repetition, which only raises a count, causes no call."""
        self._listener = listener
        for event in self._events:
            listener(event)

    @property
    def now(self) -> float:
        return self._clock()

    def add(self, kind: str, text: str, *, run: str = "", worker: str = "", **place: int) -> None:
        """Add an event, or count a repetition of a recent one. `place`: numbers of the attempt, box, slot and
        generation that the event is about, as far as they apply."""
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
        """Return the events as messages for a status reply, oldest first."""
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
    """Log an event: as a warning if it is a fault, else as information."""
    run = f"{event.run}: " if event.run else ""
    named = {"run": event.run, "worker": event.worker}
    extra = about(**event.place, **{name: value for name, value in named.items() if value})
    level = logging.WARNING if event.kind in FAULTS else logging.INFO
    _log.log(level, "%s%s: %s", run, event.kind, event.text, extra=extra)
