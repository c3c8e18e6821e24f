"""Detection of calls that wait in gRPC: the coordinator calls itself through the same queue.

The event loop takes one call at a time from this queue. On two busy cores, when 200 boxes opened a run at once, calls
waited there for 1 to 3 s, while the loop's own timer was never 0.3 s late: a worker whose heartbeat waits is not dead.
Once a probe call is answered, every call that arrived before it has been received.

A call of its own each 0.3 s would wake an idle coordinator 30 times a second, so it calls only while the answer can
matter: when calls come fast, or a peer is late.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    """Meter of the time that calls wait in gRPC's queue. `address`: "unix:/path" of a listener of this process;
    `is_due`: whether a probe is worth its cost now."""

    def __init__(self, address: str, is_due: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._is_due, self._clock = is_due, clock
        self._channel: grpc.aio.Channel | None = None
        self._probing: asyncio.Task[None] | None = None
        self._unanswered_since: float | None = None
        """Monotonic time when the oldest probe without an answer was sent."""
        self._warned = False

    def unreceived_s(self) -> float:
        """Return the largest age in seconds of a call still in the queue, as far as it is known; and measure again, if
        that is due. Call it periodically in the running event loop."""
        if self._probing is None or self._probing.done():
            if self._unanswered_since is None and not self._is_due():
                return 0.0
            self._probing = asyncio.ensure_future(self._probe())
        now = self._clock()
        self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
        return min(LONGEST_S, now - self._unanswered_since)

    async def _probe(self) -> None:
        try:
            if self._channel is None:
                self._channel = connect_aio(self.address)
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(METHOD)
            await call(b"", timeout=LONGEST_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return  # the calls before it still wait
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED and not self._warned:
                # the delay is unknown, so leases end as without this probe
                _log.warning(
                    "the delay of queued calls cannot be measured, so an overloaded coordinator may count live workers "
                    "and training jobs as dead: %s",
                    error.details(),
                )
                self._warned = True
        self._unanswered_since = None

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
        if self._channel is not None:
            await self._channel.close()
