"""How far the coordinator has heard: whether calls wait that its event loop has not got to.

A call waits in gRPC first, in a queue from which the event loop takes one at a time. On two busy cores, with 200 boxes
that opened a run at once, calls waited there for 1 to 3 s while the loop's own timer was never 0.3 s late. A worker
whose heartbeat lies there is not silent. So the coordinator calls itself, on a socket of its own, through the same
queue: once that call is answered, whatever came before it has been heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio

from penstock.proto.rpc.channel import connect_aio

__all__ = ["Hearing"]

_log = logging.getLogger("penstock.appliance")

METHOD = "/penstock.Hearing/Heard"
"""No service has it: to refuse it is an answer too, and needs neither a token nor a place among the counted calls."""
LONGEST_S = 30.0
"""Seconds for which a call of its own may keep leases from ending: what takes longer is a fault of something else."""


class Hearing:
    """
    Args:
        address: "unix:/path" of a listener of this process.
        every_s: seconds between two calls.
        clock: monotonic seconds.
    """

    def __init__(self, address: str, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._every_s, self._clock = every_s, clock
        self._heard = clock()
        """Everything that had come by then was heard."""

    def unheard_s(self) -> float:
        """Seconds from which calls may be waiting."""
        return min(LONGEST_S, self._clock() - self._heard)

    async def run(self) -> None:
        """Call again and again, for ever."""
        told = False
        async with connect_aio(self.address) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            while True:
                sent = self._clock()
                try:
                    await call(b"", timeout=LONGEST_S)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                        sent = self._clock()  # nothing is known, so leases end as they would without
                        if not told:
                            _log.warning("leases do not wait for calls that are not heard yet: %s", error.details())
                            told = True
                self._heard = sent
                await asyncio.sleep(self._every_s)
