"""Event log of the coordinator: each event that the dashboard shows is also logged once, with its fields."""

from __future__ import annotations

import logging

from penstock.appliance.model.recent_events import FAULTS, Event
from penstock.runtime.telemetry.logs import about

__all__ = ["log_event"]

_log = logging.getLogger("penstock.appliance")


def log_event(event: Event) -> None:
    """Log an event: as a warning if it is a fault, else as information."""
    run = f"{event.run}: " if event.run else ""
    named = {"run": event.run, "worker": event.worker}
    extra = about(**event.place, **{name: value for name, value in named.items() if value})
    level = logging.WARNING if event.kind in FAULTS else logging.INFO
    _log.log(level, "%s%s: %s", run, event.kind, event.text, extra=extra)
