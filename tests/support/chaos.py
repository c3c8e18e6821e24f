"""Faults of every kind at random times against a living cluster, reproducible by seed: python -m chaos.

Each run makes a plan of its seed (chaos_plan.py), takes every box's batches without a fault, then the same with the
plan's faults, and compares them step by step; a killed trainer resumes from its last saved state. Afterwards
coordinator and daemons hold no more processes, threads, descriptors and memory than before the faults. Prints the seed
and a timeline of the faults; stops at the first run that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from census import alive, census, children, descendants, own_memory, runners, settled
from chaos_plan import MIXED, Fault, Plan, TrainingJob, plan_of
from cluster import TOKEN, Cluster, running
from job import Job
from proxy import Proxy
from waiting import until

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, PenstockError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

SLOTS = 12
"""Number of slots of each daemon: any one of them has slots for all jobs."""
GRACE_S = 90.0
"""Seconds after the last fault in which no box takes a step: then the jobs hang. On a busy machine they are slow."""
RETENTION = 2000
"""Number of steps whose states stay available. Boxes without a collective run on while one of them is stopped for
several seconds, and then asks for a state of its own step."""
LEFT_S = 20.0
"""Seconds for everything that belonged to the jobs to be gone: a client's lease and a little more."""
MORE_MEMORY = 64 << 20
"""Bytes that a process may have beyond what it had before. Allocators kept 1 to 4 MiB (seeds 301 and 302)."""


class Group:
    """The boxes of one training job, which are killed and resumed together, as torchrun does it."""

    def __init__(self, cluster: Cluster, job: TrainingJob, folder: Path, address: str, *, calm: bool) -> None:
        self.job = job
        self.attempt = 0
        self.boxes = [
            Job(
                cluster,
                address=address,
                job=f"calm {job.name}" if calm else job.name,
                input=job.input,
                arguments=list(job.arguments),
                box=box,
                boxes=job.boxes,
                workers=job.workers,
                lane="auto" if calm else job.lane,
                lane_proxy=not calm and job.lane == "tcp",
                steps=job.steps,
                pace_s=0 if calm else job.pace_s,
                save=0 if calm else job.save,
                state=str(folder / f"{job.name} {box}"),
                attempt="0",
                timeout_s=60,
                retention=RETENTION,
            )
            for box in range(job.boxes)
        ]

    def hear(self) -> None:
        for box in self.boxes:
            while not box.over and box.hear(0):
                pass

    @property
    def over(self) -> bool:
        return all(box.over for box in self.boxes)

    def restart(self) -> None:
        """Kill what lives of it and resume all boxes from the last step that all have saved."""
        for box in self.boxes:
            if not box.over:
                box.process.send_signal(signal.SIGCONT)
                box.kill()
        common = set.intersection(*(set(box.saved) for box in self.boxes))
        step = max(common, default=0)
        self.attempt += 1
        for box in self.boxes:
            box.start(attempt=str(self.attempt), resume=box.saved[step] if step else "")

    def drop(self) -> None:
        for box in self.boxes:
            box.drop()


class World:
    """A cluster, its jobs, and what has been done to them."""

    def __init__(self, plan: Plan, cluster: Cluster, folder: Path, stack: ExitStack) -> None:
        self.plan = plan
        self.cluster = cluster
        self.folder = folder
        self.proxies = [stack.enter_context(Proxy(cluster.address)) for _ in range(plan.daemons)]
        for number in range(plan.daemons):
            self._start_daemon(number)
        self.groups: list[Group] = []
        self.timeline: list[str] = []
        self._mends: list[tuple[float, Callable[[], None], str]] = []
        self._down: set[int] = set()
        self._away = False
        self._orders: list[threading.Thread] = []
        self._before: list[tuple[Counter[str], int]] = []

    def _start_daemon(self, number: int) -> None:
        worker = self.cluster.add_worker(
            SLOTS, "--allow", "mixed", allow="streams", name=f"daemon-{number}", through=self.proxies[number].address
        )
        self.cluster.workers.pop()
        self.cluster.workers[number:] = [worker, *self.cluster.workers[number + 1 :]]

    # ---- one run

    def calm(self, jobs: list[TrainingJob]) -> dict[str, list[dict[int, int]]]:
        """Every box's batches without a fault."""
        groups = [Group(self.cluster, job, self.folder, self.cluster.address, calm=True) for job in jobs]
        try:
            return {group.job.name: [box.finish(120) for box in group.boxes] for group in groups}
        finally:
            for group in groups:
                group.drop()

    def storm(self) -> dict[str, list[dict[int, int]]]:
        """The same with the plan's faults."""
        self.groups = [
            Group(self.cluster, job, self.folder, self.cluster.address, calm=False) for job in self.plan.jobs
        ]
        until(lambda: self._all_begun(), 60, "the jobs have not begun")
        began = time.monotonic()
        faults = list(self.plan.faults)
        last = began + faults[-1].at_s + GRACE_S
        steps: list[int] = []
        while faults or self._mends or not all(group.over for group in self.groups):
            now = time.monotonic()
            for mend in [mend for mend in self._mends if mend[0] <= now]:
                self._mends.remove(mend)
                self._note(now - began, mend[2])
                mend[1]()
            if faults and now - began >= faults[0].at_s:
                self._note(now - began, str(faults[0]))
                self._strike(faults.pop(0), now)
            for group in self.groups:
                group.hear()
            if (taken := [box.step for group in self.groups for box in group.boxes]) != steps:
                steps, last = taken, max(last, now + GRACE_S)
            assert now < last, f"no step in {GRACE_S:g} s after the last fault: {self._where()}"
            time.sleep(0.02)
        return {group.job.name: [self._ended(box) for box in group.boxes] for group in self.groups}

    def _all_begun(self) -> bool:
        for group in self.groups:
            group.hear()
        return all(box.step for group in self.groups for box in group.boxes)

    def _ended(self, box: Job) -> dict[int, int]:
        assert box.process.returncode == 0, f"{box.options['job']} ended with status {box.process.returncode}"
        return box.batches

    def _where(self) -> str:
        return ", ".join(
            f"{box.options['job']} box {box.options['box']} at {box.step}" for g in self.groups for box in g.boxes
        )

    def _note(self, at_s: float, what: str) -> None:
        self.timeline.append(f"{at_s:6.2f} s  {what}")

    # ---- faults

    def _strike(self, fault: Fault, now: float) -> None:
        """Do it, as far as there is something that it can be done to."""
        what = fault.what
        number = fault.which % self.plan.daemons
        group = self.groups[fault.which % len(self.groups)]
        trainer = group.boxes[fault.which % len(group.boxes)]

        def later(mend: Callable[[], None]) -> None:
            self._mends.append((now + fault.lasts_s, mend, f"(over: {fault})"))

        if what == "change the mixture":
            self._change_mixture(fault.which)
        elif "coordinator" in what:
            if not self._away:
                self._away = True
                later(self._coordinator_back)
                self.cluster.coordinator.send_signal(signal.SIGKILL if "kill" in what else signal.SIGSTOP)
        elif "trainer's lanes" in what:
            if not trainer.over and trainer.options["lane_proxy"] and trainer.step:
                trainer.process.send_signal(signal.SIGUSR1 if "cut" in what else signal.SIGUSR2)
                if "silence" in what:
                    pid = trainer.pid
                    later(lambda: signal_all([pid] if trainer.pid == pid else [], signal.SIGRTMIN))
        elif "trainer" in what:
            if not group.over and what == "kill a trainer":
                group.restart()
            elif not trainer.over:
                self._signal([trainer.pid], False, later)
        elif "receiver" in what:
            self._signal(children(trainer.pid, "receiver.py") if not trainer.over else [], "kill" in what, later)
        elif "daemon's control" in what or "deafen" in what:
            proxy = self.proxies[number]
            if "cut" in what:
                proxy.cut()
            else:
                proxy.silence(*(["down"] if "deafen" in what else []))
                later(proxy.heal)
        elif number not in self._down:
            daemon = self.cluster.workers[number].pid
            self._strike_daemon(fault, number, daemon, later)

    def _change_mixture(self, which: int) -> None:
        """Order a change of the mixed job's mixture soon after what its boxes take, as the command does."""
        group = next(group for group in self.groups if group.job.name == MIXED)
        request = pb.ChangeMixtureRequest(run=MIXED, key=f"change {which}", deadline_s=10.0)
        request.from_step = max(box.step for box in group.boxes) + 20 + which % 300
        for name, weight in (("web", 1 + which % 7), ("code", 1 + which % 5)):
            request.weights.append(pb.AskedWeight(source=name, weight=str(weight)))

        def order() -> None:
            for _ in range(5):
                try:
                    with CoordinatorClient(self.cluster.address, TOKEN, insecure=True) as client:
                        client.change_mixture(request)
                    return
                except (CoordinatorUnavailableError, DeadlineError):
                    time.sleep(0.5)
                except PenstockError:
                    return  # the step has passed, or a box was away

        self._orders.append(threading.Thread(target=order))
        self._orders[-1].start()

    def changed(self) -> list[TrainingJob]:
        """Return the mixed job with the changes that are in the journal, as its code would have them."""
        if all(job.name != MIXED for job in self.plan.jobs):
            return []
        for order in self._orders:
            order.join(60)
        with closing(sqlite3.connect(f"file:{self.cluster.state_dir}/journal.db?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT change FROM mixture_changes WHERE run=? ORDER BY number", (f"{MIXED}/0",))
            found = [records_pb2.MixtureChange.FromString(change) for (change,) in rows]
        schedule: list[tuple[int, dict[str, int]]] = []
        for change in found:
            schedule = [one for one in schedule if one[0] < change.position]
            schedule.append((change.position, {weight.source: weight.parts for weight in change.weights}))
        print(f"  {len(found)} of {len(self._orders)} changes of the mixture were made", flush=True)
        return [replace(job, arguments=(schedule,)) for job in self.plan.jobs if job.name == MIXED]

    def _strike_daemon(
        self, fault: Fault, number: int, daemon: int, later: Callable[[Callable[[], None]], None]
    ) -> None:
        what = fault.what
        if what == "kill a daemon":
            self._down.add(number)
            self.cluster.workers[number].kill()
            self.cluster.workers[number].wait(10)
            later(lambda: self._daemon_back(number))
            return
        targets = {
            "runner": runners(daemon),
            "fork server": children(daemon, "fork_server"),
            "daemon": [daemon],
            "machine": [daemon, *descendants(daemon)],
        }
        below = next(found for name, found in targets.items() if what.endswith(name))
        if "machine" not in what:
            below = below[fault.which % len(below) :][:1] if below else []
        self._signal(below, "kill" in what, later)

    @staticmethod
    def _signal(pids: list[int], kill: bool, later: Callable[[Callable[[], None]], None]) -> None:
        signal_all(pids, signal.SIGKILL if kill else signal.SIGSTOP)
        if not kill:
            later(lambda: signal_all(alive(pids), signal.SIGCONT))

    def _coordinator_back(self) -> None:
        self._away = False
        if self.cluster.coordinator.poll() is None:
            self.cluster.coordinator.send_signal(signal.SIGCONT)
            with contextlib.suppress(Exception):
                self.cluster.coordinator.wait(0.05)
        if self.cluster.coordinator.poll() is not None:
            self.cluster.restart_coordinator()

    def _daemon_back(self, number: int) -> None:
        self.proxies[number].heal()  # one that cannot reach its coordinator would not say that it is there
        if self._away:
            self._mends.append((time.monotonic() + 0.2, lambda: self._daemon_back(number), "(daemon still down)"))
            return
        self._down.discard(number)
        self._start_daemon(number)

    # ---- what is held

    @property
    def _processes(self) -> list[int]:
        return [self.cluster.coordinator.pid, *(worker.pid for worker in self.cluster.workers)]

    def count(self) -> None:
        """Note what coordinator and daemons hold, once they hold nothing of a job."""

        def left() -> list[str]:
            held = [kind for pid in self._processes for kind in +census(pid)]
            return [kind for kind in held if kind == "processes" or kind.startswith("penstock-")]  # or a memfd of ours

        until(lambda: not left(), LEFT_S, lambda: f"jobs without faults left {left()}")
        self._before = [(census(pid), own_memory(pid)) for pid in self._processes]

    def clean(self) -> None:
        """Coordinator and daemons hold no more than at `count`, but for census.LOOSE. One that was started again is
        compared with the one before it."""
        settled(self._processes, [held for held, _ in self._before], LEFT_S)
        for pid, (_, then) in zip(self._processes, self._before, strict=True):
            more = own_memory(pid) - then
            assert more < MORE_MEMORY, f"process {pid} has {more >> 20} MiB more than before"

    def drop(self) -> None:
        for worker in self.cluster.workers:
            signal_all([pid for pid in [worker.pid, *descendants(worker.pid)] if alive([pid])], signal.SIGCONT)
        self.cluster.coordinator.send_signal(signal.SIGCONT)
        for group in self.groups:
            group.drop()


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def chaos(seed: int, seconds: float) -> int:
    """Make one chaos run, and return the number of faults. Raises AssertionError if any result differs from one without
    faults."""
    plan = plan_of(seed, seconds)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name, ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(running(folder / "state"))
        world = World(plan, cluster, folder, stack)
        try:
            calm = world.calm([job for job in plan.jobs if job.name != MIXED])
            world.count()
            storm = world.storm()
            calm |= world.calm(world.changed())
            for job, boxes in calm.items():
                for box, batches in enumerate(boxes):
                    got = storm[job][box]
                    wrong = [step for step in batches if got.get(step) != batches[step]]
                    assert not wrong, f"{job} box {box}: step {wrong[0]} (of {len(wrong)}) is not as without faults"
                    assert len(got) == len(batches)
            world.clean()
        except BaseException:
            print(f"seed {seed}: {plan.jobs}", *world.timeline, sep="\n  ", flush=True)
            raise
        finally:
            world.drop()
    return len(plan.faults)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults, by seed.")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count on from it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="over which faults come in each run")
    given = parser.parse_args()
    total = 0
    for seed in range(given.seed, given.seed + given.runs):
        began = time.monotonic()
        faults = chaos(seed, given.seconds)
        total += faults
        print(f"seed {seed}: {faults} faults, {time.monotonic() - began:.0f} s, as without them", flush=True)
    print(f"{given.runs} runs, {total} faults: every box's batches as without them", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
