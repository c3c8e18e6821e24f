"""Registry of the calls that wait for a change of the cluster state, by the topic of the change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from penstock.appliance.core.cluster_state import Topic

__all__ = ["TopicSignals", "TopicWaiter"]


class TopicWaiter(asyncio.Event):
    """Event for which one held call waits."""

    over = False
    """True if the call must be answered now, because too many calls wait for the same topic."""


class TopicSignals:
    """Topics (things that change) and the calls that wait for them. Calls are woken in the order of their arrival, so
    that runs of the simulation are repeatable."""

    def __init__(self) -> None:
        self._waiting: dict[Topic, dict[TopicWaiter, None]] = {}

    def changed(self, topic: Topic) -> None:
        for event in self._waiting.get(topic, ()):
            event.set()

    def wake_all(self) -> None:
        for topic in self._waiting:
            self.changed(topic)

    @contextlib.contextmanager
    def on(self, topic: Topic, most: int | None = None) -> Iterator[TopicWaiter]:
        """Return a context in which a call waits for a topic by the yielded event. `most`: largest number of calls that
        may wait for the topic; one more ends the wait of the oldest (`over`). None: no limit."""
        event = TopicWaiter()
        events = self._waiting.setdefault(topic, {})
        if most is not None and len(events) >= most:
            oldest = next(iter(events))
            del events[oldest]
            oldest.over = True
            oldest.set()
        events[event] = None
        try:
            yield event
        finally:
            events.pop(event, None)
            if not events and self._waiting.get(topic) is events:
                del self._waiting[topic]
