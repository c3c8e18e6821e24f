"""Topics of the cluster's state, and the calls that wait for their changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from penstock.appliance.core.cluster import Topic


class TopicWaiter(asyncio.Event):
    over = False
    """True if the call must be answered now, because too many wait for the same topic."""

    async def comes(self, until: float) -> bool:
        """Wait for the topic's next change; False if there is none before `until`, in the event loop's time."""
        self.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                return await self.wait()
        return False


class TopicSignals:
    """Topics and the calls that wait for them, woken in order of arrival, so that simulations are repeatable."""

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
        """Return a context in which a call waits for a topic; one more than `most` ends the oldest's wait (`over`)."""
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
