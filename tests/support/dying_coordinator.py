"""A coordinator that is killed once at each of some exact points.

TRAPS names the points: "METHOD before" or "METHOD after". METHOD is one of the service's
calls or of the state machine. Before a method nothing has happened. After it nobody has been told, and all of a call is
on disk. TRAPS_IN is the folder where each point that was reached leaves a file.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from penstock.appliance import __main__ as coordinator
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.server.service import Service


def _set(point: str, marker: str) -> None:
    name, _, when = point.rpartition(" ")
    if hasattr(Service, name):
        _set_call(name, when, marker)
        return
    inner = getattr(StateMachine, name)

    @functools.wraps(inner)
    def trap(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            _die(marker)
        result = inner(*args, **kwargs)
        _die(marker)
        return result

    setattr(StateMachine, name, trap)


def _set_call(name: str, when: str, marker: str) -> None:
    inner = getattr(Service, name)

    @functools.wraps(inner)
    async def trap(*args: Any) -> Any:
        if when == "before":
            _die(marker)
        reply = await inner(*args)
        _die(marker)
        return reply

    setattr(Service, name, trap)


def _die(marker: str) -> None:
    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    for point in os.environ["TRAPS"].split(","):
        marker = os.path.join(os.environ["TRAPS_IN"], point)
        if not os.path.exists(marker):
            _set(point, marker)
            break  # one in each life, in this order
    return coordinator.main()
