"""Random histories: whatever happens, in whatever order, the books keep their promises.

Workers and clients come, die, come back, repeat themselves and say late things; coordinators are restarted on what the
journal holds. After every event: one owner per slot and generation, generations and attempts only rise, nobody holds
more than it has room for, and what is superseded owns nothing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.appliance.journal import StateDir
from penstock.appliance.limits import Limits
from penstock.appliance.model import SlotKey
from penstock.appliance.testing import FakeBox, FakeWorker, World
from penstock.proto.errors import PenstockError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

SEEDS = [*range(40), 1121, 1325]  # two that found slots of closed boxes after a restart
EVENTS = 120


class History:
    def __init__(self, seed: int, directory: StateDir) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.world = World(Limits(losses=6), directory)
        self.workers: dict[str, FakeWorker] = {}
        self.boxes: list[FakeBox] = []
        self.said: list[pb.SlotReport] = []
        self.sessions = 0
        self.clients = 0
        self.highest_attempt = 0
        self.highest: dict[tuple[int, int], int] = {}
        self.owner: dict[tuple[SlotKey, int], tuple[str, str]] = {}

    # events ----------------------------------------------------------------------------------------------------

    def worker_comes(self) -> None:
        name = f"w{self.rng.randrange(4)}"
        self.sessions += 1
        slots, host = self.rng.randint(1, 4), self.rng.choice(["host-a", "host-b"])
        self.workers[name] = self.world.worker(name, slots, host=host, session=f"s{self.sessions}")

    def worker_registers_again(self) -> None:
        for worker in self.workers.values():
            worker.register()

    def workers_report(self) -> None:
        for worker in self.workers.values():
            reply = worker.beat()
            if reply.register_again:
                continue
            phases = [pb.STARTING, pb.READY, pb.READY]
            reports = [worker.tell(assignment, self.rng.choice(phases)) for assignment in reply.assignments]
            self.said += reports
            worker.beat(*reports)

    def runner_dies(self) -> None:
        for worker in self.workers.values():
            assignments = list(worker.beat().assignments)
            if assignments:
                worker.lose(self.rng.choice(assignments))
                return

    def user_code_fails(self) -> None:
        for worker in self.workers.values():
            for assignment in worker.beat().assignments:
                report = worker.tell(assignment, pb.FAILED)
                report.error.CopyFrom(records_pb2.ErrorDetail(name="InputFnError", message="boom"))
                worker.beat(report)
                return

    def late_words(self) -> None:
        if self.said and self.workers:
            reports = self.rng.sample(self.said, min(3, len(self.said)))
            for report in reports:
                report.lost = self.rng.random() < 0.5
                report.phase = self.rng.choice([pb.STARTING, pb.READY, pb.FAILED])
            self.rng.choice(list(self.workers.values())).beat(*reports)

    def worker_drains(self) -> None:
        if self.workers:
            worker = self.rng.choice(list(self.workers.values()))
            self.world.registry.deregister_worker(
                pb.DeregisterWorkerRequest(worker=worker.name, session=worker.session)
            )

    def worker_dies(self) -> None:
        if self.workers:
            del self.workers[self.rng.choice(list(self.workers))]

    def box_opens(self) -> None:
        self.clients += 1
        boxes = self.rng.choice([1, 2, 2])
        fields: dict[str, Any] = {"num_boxes": boxes, "client_id": f"c{self.clients}"}
        if self.rng.random() < 0.7:
            fields["attempt_key"] = f"k{self.rng.randrange(self.clients + 1)}"
        if self.rng.random() < 0.5:
            self.world.registry.blob_stored("state", 1)
            fields["resume"] = records_pb2.Resume(blob="state")
        self.boxes.append(self.world.open(self.rng.randrange(boxes), **fields))

    def box_opens_again(self) -> None:
        if self.boxes:
            box = self.rng.choice(self.boxes)
            assert self.world.registry.open_run(box.request) == box.reply

    def box_closes(self) -> None:
        if self.boxes:
            self.rng.choice(self.boxes).close()

    def boxes_report(self) -> None:
        for box in list(self.boxes):
            try:
                box.deliver(self.rng.randrange(3))
            except PenstockError:
                if self.rng.random() < 0.3:
                    self.boxes.remove(box)

    def time_passes(self) -> None:
        self.world.run_for(
            self.rng.choice([0.5, 2, 4, 12]), [w for w in self.workers.values() if self.rng.random() < 0.7]
        )

    def coordinator_restarts(self) -> None:
        self.world.journal.close()
        self.world.boot(self.directory)

    # promises --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        books = self.world.registry.books
        run = books.runs.get("job/0")
        if run is None:
            return
        assert run.attempt >= self.highest_attempt
        self.highest_attempt = run.attempt
        held: dict[SlotKey, str] = {}
        for name, worker in books.workers.items():
            assert len(worker.slots) <= worker.capacity or not worker.registered
            for key in worker.slots:
                assert key not in held
                held[key] = name
                assert run.current is not None
                assert key.attempt == run.current.number == run.attempt
        waiting = set(books.waiting)
        for slot in self.world.slots():
            place = (slot.key.box, slot.key.slot)
            assert slot.generation >= self.highest.get(place, 0)
            self.highest[place] = slot.generation
            assert held.get(slot.key, "") == slot.worker
            if slot.worker:
                owner = (slot.worker, slot.session)
                assert self.owner.setdefault((slot.key, slot.generation), owner) == owner
                assert slot.phase in (pb.STARTING, pb.READY, pb.FAILED)
            else:
                assert slot.phase in (pb.WAITING, pb.FAILED)
            box = books.box_of(slot)[1]
            live = box.place.value == "live"
            lingers = box.lingers_until > 0
            assert lingers or (slot.key in waiting) == (live and slot.phase == pb.WAITING)
            assert live or lingers or not slot.worker
        assert waiting <= {slot.key for slot in self.world.slots()}
        if waiting:
            assert not any(worker.free > 0 for worker in books.workers.values())
        for fake in self.workers.values():  # what a worker is told is what the books say
            reply = fake.beat()
            told = {SlotKey(a.run, a.attempt, a.box, a.slot) for a in reply.assignments}
            known = books.workers.get(fake.name)
            assert told == (known.slots if known is not None and not reply.register_again else set())


@pytest.mark.parametrize("seed", SEEDS)
def test_random_history(seed: int, tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    history = History(seed, directory)
    events = [
        *[history.worker_comes] * 3,
        *[history.workers_report] * 5,
        *[history.boxes_report] * 4,
        *[history.time_passes] * 3,
        *[history.box_opens] * 3,
        *[history.runner_dies] * 2,
        history.box_opens_again,
        history.box_closes,
        history.user_code_fails,
        history.late_words,
        history.worker_drains,
        history.worker_dies,
        history.worker_registers_again,
        history.coordinator_restarts,
    ]
    refused = 0
    for _ in range(EVENTS):
        event = history.rng.choice(events)
        try:
            event()
        except PenstockError:
            refused += 1
        history.check()
    assert refused < EVENTS / 2  # else the history exercises nothing
    history.world.journal.close()
    directory.close()
