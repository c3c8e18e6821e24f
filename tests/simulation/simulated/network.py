"""A network between simulated processes: calls whose messages are lost, late, doubled or overtaken, and cut links.

A call is what gRPC makes of one: a request, a reply or an error of the catalogue, a deadline, and a cancellation that
tells the server when its caller gave up or died. A request that is lost is noticed by its deadline alone, for that is
what a half-open connection looks like; one to a process that is not there is refused at once. A message that is doubled
arrives as a second call, as after a retry whose first try got through. Nothing keeps two messages in order.

Links are cut for each direction by itself, so a partition may be one-way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulated.virtual import Process, World

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, PenstockError
from penstock.proto.rpc.wire_errors import detail_of, error_of

__all__ = ["Network", "Weather"]


@dataclass
class Weather:
    """Probabilities of a message's fates, from 0 to 1."""

    lost: float = 0.0
    doubled: float = 0.0
    slow: float = 0.0
    """Late by up to three seconds, so that others overtake it."""
    stray: float = 0.0
    """Late by up to fifteen: its sender has long given up."""


@dataclass(eq=False)
class _Call:
    method: str
    request: Any
    source: Process
    target: str
    future: asyncio.Future[Any]
    task: asyncio.Task[None] | None = None


class Network:
    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.abandon_epoch: dict[tuple[str, str], int] = {}
        """(from, to) -> how many partitions cut this direction now."""
        self._serving: dict[Process, dict[_Call, None]] = {}

    def calm(self) -> None:
        """All links work from now on; what is under way stays under way."""
        self.weather = Weather()
        self.abandon_epoch.clear()

    # ---- one message

    def _delay(self) -> float | None:
        """None: it is lost."""
        world, weather, rng = self.world, self.weather, self.world.rng
        dice = rng.random()
        if dice < weather.lost:
            world.fault("message lost")
            return None
        dice -= weather.lost
        if dice < weather.slow:
            world.fault("message slow")
            return 0.05 + 3.0 * rng.random()
        if dice < weather.slow + weather.stray:
            world.fault("message stray")
            return 3.0 + 12.0 * rng.random()
        return 0.0003 + 0.002 * rng.random()

    def _send(self, source: str, target: str, arrive: Callable[[], None], process: Process | None = None) -> None:
        """Deliver to `process` (None: to the fate, which never stops), unless the link is cut by then."""
        delay = self._delay()
        if delay is None:
            return
        if (source, target) in self.abandon_epoch:
            self.world.fault("message into a cut")
            return
        (process or self.world.fate).call_later(delay, arrive)

    # ---- calls

    async def call(self, source: Process, target: str, method: str, request: Any, deadline_s: float) -> Any:
        """The reply. Raises what the other side raised, CoordinatorUnavailableError or DeadlineError."""
        call = _Call(method, request, source, target, source.create_future())
        self._send(source.name, target, lambda: self._arrive(call))
        if self.weather.doubled and self.world.rng.random() < self.weather.doubled:
            self.world.fault("message doubled")
            again = _Call(method, request, source, target, source.create_future())
            self._send(source.name, target, lambda: self._arrive(again))
        timer = source.call_later(deadline_s, self._expire, call, deadline_s)
        answered = False
        try:
            reply = await call.future
            answered = True
            return reply
        except PenstockError as error:
            answered = not isinstance(error, DeadlineError) or call.task is None
            raise
        finally:
            timer.cancel()
            if not answered:  # the caller gave up, or died: its kernel says so
                self._send(source.name, target, lambda: self._cancel(call))

    def _expire(self, call: _Call, deadline_s: float) -> None:
        if not call.future.done():
            _fail(call.future, DeadlineError(f"{call.target} did not answer {call.method} in {deadline_s:g} s"))

    def _cancel(self, call: _Call) -> None:
        process = self.world.processes.get(call.target)
        if call.task is not None and process is not None and call in self._serving.get(process, ()):
            call.task.cancel()

    def _arrive(self, call: _Call) -> None:
        process = self.world.processes.get(call.target)
        if process is None or not process.alive or process.serve is None:
            self._refuse(call, f"{call.target} is not there")
            return
        if process not in self._serving:
            self._serving[process] = {}
            process.on_death.append(lambda: self._died(process))
        self._serving[process][call] = None
        call.task = process.spawn(self._answer(process, call))

    async def _answer(self, process: Process, call: _Call) -> None:
        assert process.serve is not None
        serving = self._serving[process]
        try:
            reply = await process.serve(call.method, call.request)
        except PenstockError as error:
            # It travels by name and message, and is another object there.
            self._reply(process, call, None, error_of(detail_of(error)))
        else:
            self._reply(process, call, reply, None)
        finally:
            serving.pop(call, None)

    def _reply(self, process: Process, call: _Call, reply: Any, error: PenstockError | None) -> None:
        def arrive() -> None:
            if call.future.done() or not call.source.alive:
                return
            if error is None:
                call.future.set_result(reply)
            else:
                _fail(call.future, error)

        self._send(process.name, call.source.name, arrive, call.source)

    def _refuse(self, call: _Call, why: str) -> None:
        def arrive() -> None:
            if not call.future.done():
                _fail(call.future, CoordinatorUnavailableError(f"{call.method}: {why}"))

        self._send(call.target, call.source.name, arrive, call.source)

    def _died(self, process: Process) -> None:
        """Its kernel closes its connections; who is cut off from it does not learn of that."""
        for call in self._serving.pop(process, {}):
            self._refuse(call, f"{process.name} died")


def _fail(future: asyncio.Future[Any], error: PenstockError) -> None:
    future.set_exception(error)
    future.exception()  # seen: a caller that is cancelled in this very moment will not look
