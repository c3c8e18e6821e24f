"""What happened lately, for people who look: a short memory of faults and changes, gone with the process.

The same thing said of many slots, when a worker with a hundred of them dies, is one event with a count. The journal
keeps what must be known; this is a diary, bounded, that nothing depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.proto.v1 import coordinator_pb2 as pb

MOST = 256
"""Events that are remembered."""
TOGETHER_S = 5.0
"""The same event again within this time counts as one with it."""
_LOOK_BACK = 8
_TEXT = 400
"""Characters, of names too: peers have a say in them."""

FAULTS = frozenset(
    ("worker lost", "slot lost", "slot failed", "batch quarantined", "box lost", "coordinator restarted")
)
"""Kinds that nobody asked for. The others: worker joined, worker drains, worker back, worker left; slot moved, slot
handed over, slot recovered; box opened, box back, box closed; attempt superseded, attempt ended."""


@dataclass
class Event:
    kind: str
    text: str
    at: float
    """Monotonic seconds, of the first of them."""
    wall_s: float
    """Seconds since the epoch."""
    run: str = ""
    worker: str = ""
    place: Mapping[str, int] = field(default_factory=dict)
    """attempt, box, slot and generation, as far as it concerns one."""
    count: int = 1


class RecentEvents:
    """
    Args:
        clock: monotonic seconds.
        wall: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._events: deque[Event] = deque(maxlen=MOST)
        self._told: Callable[[Event], None] = lambda event: None

    def listen(self, told: Callable[[Event], None]) -> None:
        """`told` hears of each event: of those so far, and of the others as they happen."""
        self._told = told
        for event in self._events:
            told(event)

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def add(self, kind: str, text: str, *, run: str = "", worker: str = "", **place: int) -> None:
        """`place`: attempt, box, slot and generation, as far as it concerns one."""
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
        self._told(event)

    def messages(self) -> list[pb.Event]:
        """Oldest first."""
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
