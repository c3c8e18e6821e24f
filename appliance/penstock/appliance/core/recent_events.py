"""Recent events, for the dashboard and the event log: a bounded list, lost when the process ends, on which no decision
depends. An event of many slots, such as the loss of a worker with a hundred, is one event with a count."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

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
opened, back, closed; mixture changed, run restarted. "run ended" is a fault by its reason (run_end.py)."""


class RecentEvents:
    """List of the latest events, with repetitions counted. `clock`: monotonic; `wall`: seconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._events: deque[tuple[float, pb.Event]] = deque(maxlen=MOST)
        """Events of status replies, each with the monotonic time of its first occurrence."""

    def add(
        self, kind: str, text: str, *, run: str = "", worker: str = "", fault: bool | None = None, **place: int
    ) -> None:
        """Add and log an event, or count a repetition. `fault`: whether it is one, if its kind does not say so;
        `place`: numbers of attempt, box, slot, generation, step."""
        now = self._clock()
        text, run, worker = text[:_TEXT], run[:_TEXT], worker[:_TEXT]
        for at, known in islice(reversed(self._events), _LOOK_BACK):
            same = (known.kind, known.text, known.run, known.worker) == (kind, text, run, worker)
            if same and now - at <= TOGETHER_S:
                known.count += 1
                return
        fault = kind in FAULTS if fault is None else fault
        event = pb.Event(kind=kind, fault=fault, wall_s=self._wall(), text=text, run=run, worker=worker, count=1)
        self._events.append((now, event))
        _log_event(event, place)

    def messages(self) -> list[pb.Event]:
        """Return the events for a status reply, oldest first."""
        now = self._clock()
        for at, event in self._events:
            event.age_s = max(0.0, now - at)
        return [event for _, event in self._events]


def _log_event(event: pb.Event, place: Mapping[str, int]) -> None:
    run = f"{event.run}: " if event.run else ""
    named = {"run": event.run, "worker": event.worker}
    extra = about(**place, **{name: value for name, value in named.items() if value})
    level = logging.WARNING if event.fault else logging.INFO
    _log.log(level, "%s%s: %s", run, event.kind, event.text, extra=extra)
