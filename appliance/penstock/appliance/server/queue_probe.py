"""Detection of calls that wait in gRPC: the coordinator calls itself through the same queue.

The event loop takes one call at a time from this queue. On two busy cores, when 200 boxes opened a run at once, calls
waited there for 1 to 3 s, while the loop's own timer was never 0.3 s late: a worker whose heartbeat waits is not dead.
Once a probe call is answered, every call that arrived before it has been received.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio

from penstock.proto.rpc.channel import connect_aio

_log = logging.getLogger("penstock.appliance")

METHOD = "/penstock.QueueProbe/Probe"
"""Method that the probe calls. No service has it: gRPC's refusal suffices, and needs no token or rate limit."""
LONGEST_S = 30.0
"""Longest extension of leases in seconds for an unanswered probe; a longer delay has another cause."""


class QueueProbe:
    """Meter of the time that calls wait in gRPC's queue. `address`: "unix:/path" of a listener of this process."""

    def __init__(self, address: str, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._every_s, self._clock = every_s, clock
        self._received_until = clock()
        """Monotonic time when the newest answered probe was sent; calls that arrived earlier have left the queue."""

    def unreceived_s(self) -> float:
        """Return the largest age in seconds of a call still in the queue."""
        return min(LONGEST_S, self._clock() - self._received_until)

    async def run(self) -> None:
        warned = False
        async with connect_aio(self.address) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            while True:
                sent = self._clock()
                try:
                    await call(b"", timeout=LONGEST_S)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                        sent = self._clock()  # the delay is unknown, so leases end as without this probe
                        if not warned:
                            _log.warning(
                                "the delay of queued calls cannot be measured, so an overloaded coordinator may count "
                                "live workers and training jobs as dead: %s",
                                error.details(),
                            )
                            warned = True
                self._received_until = sent
                await asyncio.sleep(self._every_s)
