"""Calls of ChangeMixture (`penstock mix`). This module waits; mixture_orders.py decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from google.protobuf.message import DecodeError

from penstock.appliance.core.cluster import Topic
from penstock.appliance.core.mixture_orders import AGAIN, MixtureOrders, Proposal
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.core.state_query import BoxState, MixtureTrial, StateQuery
from penstock.appliance.server.topic_signals import TopicWaiter
from penstock.proto.errors import SAME_RELEASE, DeadlineError, ProtocolError
from penstock.proto.v1 import coordinator_pb2 as pb

LOOK_S = 0.2
"""Longest time in seconds until a waiting change is checked again."""

TRIALS_AT_ONCE = 16
"""Most workers that try a change at a time."""

T = TypeVar("T")
_Complete = Callable[[StateQuery, int, float, float], Awaitable[BoxState]]


class MixtureCalls:
    """Handler of ChangeMixture calls, in the event loop. `on`: TopicSignals.on; `complete`: Service._complete."""

    def __init__(
        self,
        state_machine: StateMachine,
        on: Callable[[Topic], AbstractContextManager[TopicWaiter]],
        complete: _Complete,
    ) -> None:
        self._state_machine, self._on, self._complete = state_machine, on, complete
        self._orders = MixtureOrders(state_machine.cluster, state_machine.placement, state_machine.state_queries)

    async def change(self, request: pb.ChangeMixtureRequest) -> pb.ChangeMixtureReply:
        """Try a change on one worker, or on all if it adds sources, and make it unless `dry_run`; a repeated request
        gets its change at once. Raises if it was not made or the trial failed."""
        made = self._orders.repeated(request)
        if made is not None:
            return made
        loop = asyncio.get_running_loop()
        until = loop.time() + request.deadline_s
        trials = self._orders.trials(request)
        turns = asyncio.Semaphore(TRIALS_AT_ONCE)
        plans = await _all(self._tried(trial, turns, until, request.deadline_s) for trial in trials)
        made = self._orders.repeated(request)
        if made is not None:  # the same call came twice, and the other one has made the change
            return made
        proposal = self._orders.proposed(request, trials, plans)
        if not request.dry_run:
            await self._make(proposal, min(until, loop.time() + self._orders.patience(proposal)))
        return pb.ChangeMixtureReply(
            run=proposal.run.name,
            change=proposal.change,
            shares=proposal.shares,
            slots=proposal.slots,
            batches=proposal.batches,
        )

    async def _tried(
        self, trial: MixtureTrial, turns: asyncio.Semaphore, until: float, deadline_s: float
    ) -> pb.MixturePlan:
        state_machine = self._state_machine
        async with turns:
            state_machine.state_queries.ask(trial, state_machine.clock() + deadline_s)
            try:
                state_machine.settle()
                state = await self._complete(trial, 0, until, deadline_s)
            finally:
                state_machine.state_queries.end(trial)
        try:
            return pb.MixturePlan.FromString(state.records[0][1])
        except DecodeError as error:
            raise ProtocolError(f"a worker's answer to a trial cannot be read: {error}. {SAME_RELEASE}") from error

    async def _make(self, proposal: Proposal, until: float) -> None:
        """Make the change once all boxes wait before its step. Raises DeadlineError at `until`, in the loop's time."""
        orders, state_machine = self._orders, self._state_machine
        try:
            with self._on(("mixture", proposal.run.name)) as event:
                orders.fence(proposal)
                state_machine.settle()
                while waits_for := orders.undecided(proposal):
                    if asyncio.get_running_loop().time() > until:
                        raise DeadlineError(
                            f"the mixture of run {proposal.run.name} is unchanged: waited for {waits_for}. {AGAIN}"
                        )
                    await event.comes(asyncio.get_running_loop().time() + LOOK_S)
            orders.make(proposal)
            state_machine.settle()
        finally:
            orders.withdraw(proposal)


async def _all(waits: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, also if one fails. Raises the first error."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
