"""The coordinator under test: the real StateMachine, Snapshot index and Service, on the simulated disk and network.

A boot is what server.py does, without sockets. A crash takes the process with all that it has not synced; the next boot
starts from what the disk holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

from simulated.disk import Disk, Fate, SimulatedJournal, SimulatedStore
from simulated.truth import Truth
from simulated.virtual import World

from penstock.appliance.core.cluster import Topic
from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.appliance.limits import Limits
from penstock.appliance.server.service import Service
from penstock.appliance.server.topic_signals import TopicSignals

__all__ = ["NAME", "Coordinator"]

NAME = "coordinator"

_STREAMED = {"PutSnapshot", "PutState", "PutBlob"}
_STREAMS = {"FetchState", "GetSnapshots", "GetBlob"}
_Part = TypeVar("_Part")


class Coordinator:
    """All its incarnations."""

    def __init__(self, world: World, disk: Disk, truth: Truth, limits: Limits) -> None:
        self.world = world
        self.disk = disk
        self.limits = limits
        self.crash_share = 0.0
        """Share of writes that the process does not survive."""
        self.full_until = 0.0
        self.back_after = (0.2, 4.0)
        """A crash of its own is followed by a boot so much later."""
        self._truth = truth
        self.boot()

    def boot(self) -> None:
        world, disk = self.world, self.disk
        process = self.process = world.process(NAME)
        world.note(NAME, f"boots, number {disk.boots + 1}")
        journal = SimulatedJournal(disk, self._fate, process.kill, self._truth.changed, self._truth.written)
        store = SimulatedStore(disk, self._fate, process.kill)
        process.on_death.append(journal.close)
        process.on_death.append(store.close)
        snapshot_index = SnapshotIndex(self.limits.budget)
        snapshot_index.load(*store.index(), world.now)
        signals = TopicSignals()

        def changed(topic: Topic) -> None:
            self._truth.stirred = True
            signals.changed(topic)

        self.state_machine = StateMachine(
            journal,
            snapshot_index,
            self.limits,
            clock=process.time,
            wall=process.time,
            fresh_seed=lambda: world.rng.getrandbits(63),
            changed=changed,
        )
        self._truth.booted(self.state_machine)
        self.service = Service(self.state_machine, store, signals)
        process.serve = self._serve
        process.spawn(self.service.run_ticker())

    def crash(self) -> None:
        self.process.kill()

    def _fate(self) -> Fate:
        world = self.world
        if world.now < self.full_until:
            world.fault(Fate.FULL.value)
            self._truth.before.blurred = True
            return Fate.FULL
        if self.crash_share and world.rng.random() < self.crash_share:
            fate = world.rng.choice((Fate.LOST, Fate.UNHEARD))
            world.fault(fate.value)
            world.fate.call_later(world.rng.uniform(*self.back_after), self._back)
            return fate
        return Fate.FINE

    def _back(self) -> None:
        if not self.process.alive:
            self.boot()

    async def _serve(self, method: str, request: Any) -> Any:
        truth, handler = self._truth, getattr(self.service, method)
        truth.arrived(method, request)
        if method in _STREAMED:
            reply = await handler(_stream(request), _PEER)
        elif method in _STREAMS:
            reply = [part async for part in handler(request, _PEER)]
        else:
            try:
                reply = await handler(request, _PEER)
            except asyncio.CancelledError:
                if method == "Heartbeat":
                    truth.before.hung_up.add(request.worker)
                raise
        truth.replies(method, request, reply)
        return reply


class _Peer:
    """Context of a call, with what handlers use of it."""

    def peer(self) -> str:
        return "unix:/simulated"


_PEER = _Peer()


async def _stream(parts: Iterable[_Part]) -> AsyncIterator[_Part]:
    for part in parts:
        yield part
