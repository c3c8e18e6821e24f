"""Detection of calls that wait in gRPC before the event loop receives them: the coordinator calls itself through the
same queue.

A call first waits in a queue of gRPC, from which the event loop takes one call at a time. On two busy cores, when 200
boxes opened a run at once, calls waited in this queue for 1 to 3 s, while the loop's own timer was never 0.3 s late. A
worker whose heartbeat waits in the queue is not dead. So the coordinator calls itself through the queue, on a socket of
its own. Once this probe call is answered, every call that arrived before the probe has been received.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio

from penstock.proto.rpc.channel import connect_aio

__all__ = ["QueueProbe"]

_log = logging.getLogger("penstock.appliance")

METHOD = "/penstock.QueueProbe/Probe"
"""Name of the gRPC method that the probe calls. No service has such a method. gRPC's refusal is a sufficient answer,
and needs neither a token nor a rate limit."""
LONGEST_S = 30.0
"""Longest time in seconds by which leases are extended because a probe is not answered. A longer delay has another
cause."""


class QueueProbe:
    """Meter of the time that calls wait in gRPC's queue before the event loop receives them.

    Args:
        address: "unix:/path" of a listener of this process.
        every_s: seconds between two probes.
        clock: returns monotonic seconds.
    """

    def __init__(self, address: str, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._every_s, self._clock = every_s, clock
        self._received_until = clock()
        """Monotonic time when the newest answered probe was sent: all calls that arrived earlier have left the
        queue."""

    def unreceived_s(self) -> float:
        """Return the largest age in seconds that a call still in the queue can have."""
        return min(LONGEST_S, self._clock() - self._received_until)

    async def run(self) -> None:
        """Send a probe every `every_s` seconds, until cancelled."""
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
