"""History of one seed: which processes run, what goes wrong and when, and that all comes to its end once it stops.

A seed first decides which kinds of fault this history knows, for a run in which everything fails at once never gets to
the deep states. Faults happen until HEAL_S; then links, disk and processes are made whole, and every run must end
within PATIENCE_S. If one does not, the result says what everybody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fake_cluster import limited
from simulated.coordinator import NAME, Coordinator
from simulated.disk import Disk
from simulated.network import Network, Weather
from simulated.reference import RunPlan, plan_run
from simulated.trainer import Job
from simulated.truth import Truth
from simulated.virtual import Process, World
from simulated.worker import Daemon

from penstock.appliance.core.state_machine import STALL_S
from penstock.appliance.limits import Limits
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, JournalError, PenstockError
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Outcome", "simulate"]

HEAL_S = 14.0
PATIENCE_S = 150.0
"""Seconds of virtual time for leases, a linger, and a few launches that must still learn that they are superseded."""

LIMITS = Limits(balance_after_s=2.0)
CONSTANTS = {
    "linger_s": 8.0,
    "abandoned_s": 30.0,
    "past_attempts": 3,
    "losses": 5,
    "target_ready_s": 5.0,
    "migration_s": 1.0,
    "left_alone_s": 3.0,
    "balance_every_s": 0.5,
    "slots_at_once": 2,
}
"""Shorter than in life where life has minutes, so that a history sees their ends too."""


@dataclass
class Outcome:
    seed: int
    broken: str
    """The promise that was, and how; "" if none."""
    faults: Counter[str]
    deliveries: int
    saves: int
    diary: list[str]


@limited(**CONSTANTS)
def simulate(seed: int, *, tracing: bool = False) -> Outcome:
    """Plays the history of a seed."""
    history = History(seed, tracing)
    history.play()
    world, truth = history.world, history.truth
    return Outcome(seed, world.broken, world.injected, truth.deliveries, truth.saves, world.diary or [])


class History:
    def __init__(self, seed: int, tracing: bool) -> None:
        world = self.world = World(seed, tracing=tracing)
        rng = world.rng
        self.plans: list[RunPlan] = [plan_run(rng, 0, rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3)))]
        if rng.random() < 0.25:
            self.plans.append(plan_run(rng, 1, 1, rng.choice((1, 2))))
        self.slots = sum(plan.slots for plan in self.plans)
        self.network = Network(world, Weather())
        disk = Disk()
        self.truth = Truth(world, disk, LIMITS, {plan.name: plan for plan in self.plans})
        self.coordinator = Coordinator(world, disk, self.truth, LIMITS)
        self.jobs = [
            Job(world, self.network, self.truth, plan, rng.random() < 0.8, rng.random() < 0.5) for plan in self.plans
        ]
        self.daemons: list[Daemon] = []
        """The newest incarnation of each."""
        self._stopped_at: dict[str, float] = {}
        self.sessions = 0
        for number in range(rng.randint(1, 4)):
            self._start_worker(f"w{number}", rng.randint(1, 4))
        self._more_workers()
        self._faulty = rng.random() > 0.05
        if self._faulty:
            self._choose_faults()

    # ---- workers

    def _start_worker(self, name: str, slots: int) -> None:
        self.sessions += 1
        host = f"host-{self.world.rng.randrange(3)}"
        session = f"s{self.sessions}"
        daemon = Daemon(self.world, self.network, self.truth, name, slots=slots, host=host, session=session)
        daemon.process.on_death.append(lambda: self._supervise(daemon))
        self.daemons = [other for other in self.daemons if other.name != name] + [daemon]

    def _supervise(self, daemon: Daemon) -> None:
        """Restart a process that ends by itself."""

        def start() -> None:
            if daemon in self.daemons:
                self._start_worker(daemon.name, daemon.slots)

        if daemon.superseded:
            self.world.fate.call_later(1.0, start)

    def _living(self) -> list[Daemon]:
        return [daemon for daemon in self.daemons if daemon.process.alive]

    def _more_workers(self) -> None:
        """Start as many workers as the runs need."""
        while sum(daemon.slots for daemon in self._living() if not daemon.leaving) < self.slots:
            self._start_worker(f"w{len(self.daemons)}", self.world.rng.randint(1, 4))

    # ---- the history

    def play(self) -> None:
        world, fate = self.world, self.world.fate
        try:
            for job in self.jobs:
                fate.spawn(job.launch())
            if self._faulty:
                fate.spawn(self._faults())
            world.run(HEAL_S, self._done)
            self._heal()
            world.run(HEAL_S + PATIENCE_S, self._done)
            if not world.broken and not self._done():
                waits = "; ".join(self._waits_for())
                world.broken = f"every run ends: {PATIENCE_S:g} s after the last fault these wait: {waits}"
        finally:
            world.end()

    def _done(self) -> bool:
        return all(job.over for job in self.jobs)

    def _waits_for(self) -> list[str]:
        waits = [line for job in self.jobs for line in job.waits_for()]
        waiting = self.coordinator.state_machine.placement.waiting
        waits += [f"coordinator: {key} waits for a worker" for key in waiting]
        return waits + [f"{daemon.name}: {len(daemon.runners)} of {daemon.slots}" for daemon in self._living()]

    def _heal(self) -> None:
        world = self.world
        if world.broken or self._done():
            return
        world.note("FAULT", "none from now on")
        self._faulty = False
        self.network.calm()
        self.coordinator.crash_share = self.coordinator.full_until = 0.0
        if not self.coordinator.process.alive:
            self.coordinator.boot()
        for process in list(world.processes.values()):
            if process.paused:
                self._wake(process)
        for daemon in self.daemons:
            if not daemon.process.alive:
                self._start_worker(daemon.name, daemon.slots)
        self._more_workers()
        for daemon in self.daemons:
            world.fate.spawn(self._take_back(daemon))
        self.truth.heal()

    # ---- faults

    def _choose_faults(self) -> None:
        rng = self.world.rng
        share = rng.choice((0.01, 0.03, 0.1))
        weather = self.network.weather
        weather.lost = share if rng.random() < 0.4 else 0.0
        weather.doubled = share if rng.random() < 0.5 else 0.0
        weather.slow = share if rng.random() < 0.4 else 0.0
        weather.stray = share / 2 if rng.random() < 0.4 else 0.0
        self.coordinator.crash_share = rng.choice((0.0, 0.0, 0.02, 0.1))
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._coordinator_dies,
            self._coordinator_stops,
            self._disk_fills,
            self._worker_dies,
            self._worker_dies,
            self._worker_stops,
            self._worker_leaves,
            self._worker_drains,
            self._runner_dies,
            self._runner_dies,
            self._box_dies,
            self._box_stops,
            self._link_breaks,
            self._link_breaks,
        ]
        self._kinds = rng.sample(kinds, rng.randint(1, 6))
        if rng.random() < 0.5:
            self._kinds += [self._mixture_changes] * rng.randint(1, 4)
        self._pause_s = rng.choice((0.5, 1.5, 4.0))

    async def _faults(self) -> None:
        rng = self.world.rng
        while True:
            await asyncio.sleep(rng.expovariate(1 / self._pause_s))
            if not self._faulty:
                return
            self.world.fate.spawn(rng.choice(self._kinds)())

    async def _coordinator_dies(self) -> None:
        if self.coordinator.process.alive:
            self.world.fault("coordinator killed")
            self.coordinator.crash()
            await asyncio.sleep(self.world.rng.choice((0.1, 1.0, 5.0)) * self.world.rng.random())
            if not self.coordinator.process.alive:
                self.coordinator.boot()

    async def _coordinator_stops(self) -> None:
        await self._stop(NAME, self.world.rng.choice((0.5, 2.0, 6.0)))

    async def _disk_fills(self) -> None:
        world = self.world
        self.coordinator.full_until = world.now + world.rng.uniform(0.1, 3.0)
        world.note("FAULT", f"the disk is full until {self.coordinator.full_until:.1f}")

    async def _worker_dies(self) -> None:
        rng, living = self.world.rng, self._living()
        if living:
            daemon = rng.choice(living)
            self.world.fault("worker killed", daemon.name)
            daemon.process.kill()
            await asyncio.sleep(rng.choice((0.3, 2.0, 8.0)) * rng.random())
            if daemon in self.daemons:
                self._start_worker(daemon.name, daemon.slots)

    async def _worker_stops(self) -> None:
        rng, living = self.world.rng, self._living()
        if living:
            await self._stop(rng.choice(living).name, rng.choice((0.5, 2.0, 6.0)))

    async def _worker_drains(self) -> None:
        """Drain a worker by an operator's order, and undo it later."""
        rng, living = self.world.rng, self._living()
        if living:
            name = rng.choice(living).name
            self.world.fault("worker drained", name)
            await self._order(name, undo=False)
            await asyncio.sleep(rng.uniform(0.5, 5.0))
            await self._order(name, undo=True)

    async def _mixture_changes(self) -> None:
        """Change the mixture of a run by an operator's order; sometimes two operators order at once."""
        job = self.world.rng.choice(self.jobs)
        if self.world.rng.random() < 0.3:
            self.world.fate.spawn(self._mixture_change(job))
        await self._mixture_change(job)

    async def _mixture_change(self, job: Job) -> None:
        """Order it soon before or after what the boxes take, and repeat the order if no answer comes."""
        rng = self.world.rng
        reached = max((box.taken for box in job.members), default=0)
        self.sessions += 1
        request = pb.ChangeMixtureRequest(run=job.plan.name, key=f"c{self.sessions}", deadline_s=8.0)
        request.from_step = max(1, reached + rng.randint(0, 6))
        request.retired.append("web")
        operator = self.world.process("operator")

        async def order() -> None:
            for _ in range(3):
                try:
                    await self.network.call(operator, NAME, "ChangeMixture", request, 10.0)
                    self.world.fault("mixture changed", f"{request.run} from step {request.from_step}")
                except (CoordinatorUnavailableError, DeadlineError, JournalError):
                    await asyncio.sleep(0.5)
                    continue
                except PenstockError:
                    self.world.fault("mixture not changed")
                break
            operator.kill()

        await self._in(operator, order())

    async def _take_back(self, daemon: Daemon) -> None:
        """The operator sees to it that it does not drain for ever, also not by an order from before that comes late."""
        await asyncio.sleep(1.0)
        heard = False
        while daemon.process.alive:
            if daemon.drains or not heard:
                heard = await self._order(daemon.name, undo=True)
            await asyncio.sleep(0.5)

    async def _order(self, worker: str, *, undo: bool) -> bool:
        """Send the order; return whether it was received."""
        operator = self.world.process("operator")
        request = pb.DrainWorkerRequest(worker=worker, undo=undo)
        heard = False

        async def order() -> None:
            nonlocal heard
            with contextlib.suppress(PenstockError):
                await self.network.call(operator, NAME, "DrainWorker", request, 2.0)
                heard = True
            operator.kill()

        await self._in(operator, order())
        return heard

    async def _worker_leaves(self) -> None:
        rng, living = self.world.rng, self._living()
        if living:
            daemon = rng.choice(living)
            self.world.fault("worker leaves", daemon.name)
            await self._in(daemon.process, daemon.leave())
            await asyncio.sleep(rng.random())
            if daemon in self.daemons and not daemon.process.alive:
                self._start_worker(daemon.name, daemon.slots)

    async def _in(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        """Work of another process, which ends it, awaited from fate."""
        done = asyncio.Event()
        process.on_death.append(lambda: done.set())
        process.spawn(work)
        await done.wait()

    async def _runner_dies(self) -> None:
        rng = self.world.rng
        running = [(daemon, key) for daemon in self._living() for key in daemon.runners if not daemon.process.paused]
        if running:
            daemon, key = rng.choice(running)
            self.world.fault("runner killed", str(key))
            daemon.process.call_soon(daemon.lose_runner, key)

    async def _box_dies(self) -> None:
        boxes = [box for job in self.jobs for box in job.members if not box.outcome]
        if boxes:
            box = self.world.rng.choice(boxes)
            self.world.fault("box killed", box.process.name)
            box.process.kill()

    async def _box_stops(self) -> None:
        rng = self.world.rng
        boxes = [box for job in self.jobs for box in job.boxes if not box.outcome]
        if boxes:
            await self._stop(rng.choice(boxes).process.name, rng.choice((1.0, 5.0, 14.0)))

    async def _stop(self, name: str, about_s: float) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        process = self.world.processes[name]
        if process.alive and not process.paused:
            self.world.fault("process stopped", name)
            process.pause()
            self._stopped_at[name] = self.world.now
            await asyncio.sleep(about_s * self.world.rng.uniform(0.5, 1.2))
            if process.paused:
                self._wake(process)

    def _wake(self, process: Process) -> None:
        name = process.name
        slept = self.world.now - self._stopped_at.pop(name, self.world.now)
        if name == NAME and process.alive and slept > STALL_S:
            self.truth.before.asleep += slept
        self.world.note(name, f"goes on after {slept:.1f} s")
        process.resume()

    async def _link_breaks(self) -> None:
        world, rng, abandon_epoch = self.world, self.world.rng, self.network.abandon_epoch
        living = self._living()
        boxes = [box.process.name for job in self.jobs for box in job.boxes if not box.outcome]
        ends = [daemon.name for daemon in living] + boxes
        if not ends:
            return
        one = rng.choice(ends)
        other = rng.choice([NAME, NAME, *(name for name in ends if name != one)])
        ways = rng.choice(([(one, other)], [(other, one)], [(one, other), (other, one)]))
        world.fault("link cut" if len(ways) == 2 else "link cut one way", f"{ways}")
        for way in ways:
            abandon_epoch[way] = abandon_epoch.get(way, 0) + 1
        await asyncio.sleep(rng.choice((0.5, 4.0, 12.0)) * rng.random())
        for way in ways:
            left = abandon_epoch.get(way, 0) - 1
            if left > 0:
                abandon_epoch[way] = left
            else:
                abandon_epoch.pop(way, None)
