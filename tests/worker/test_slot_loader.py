"""A slot's loader by its positions: pure epochs as functions of their number, resumes, and loaders of four methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError
from penstock.proto.state.assignment import assigned, current_assignment
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Leg
from penstock.worker.loader.restart_points import END, RestartPoint
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import reach, replay
from penstock.worker.runner.replayer import _advanced

PURE = [
    *("twice", "counts_epochs", "draws_late", "delayed:never_the_same"),
]
"""Loaders whose states mislead, forget an epoch's number, or are not equal from one call to the next."""


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with assigned(current_assignment()):
        yield


def assignment_of(name: str, *arguments: Any) -> records_pb2.WorkerAssignment:
    assignment = records_pb2.WorkerAssignment(run="job/0", attempt=1, num_boxes=1, num_workers_per_box=1, seed=5)
    assignment.loader.input_fn = name if ":" in name else f"doubtful:{name}"
    assignment.loader.arguments = encode_state({"args": arguments, "kwargs": {}})
    assignment.loader.allow.extend(["doubtful", "delayed", "streams"])
    return assignment


def pure_assignment(loader: str) -> records_pb2.WorkerAssignment:
    return assignment_of(loader, *((12,) if loader == "twice" else ()))


class Run:
    """A slot's stream, with the restart point after each batch."""

    def __init__(self, assignment: records_pb2.WorkerAssignment, resume: dict[str, Any] | None = None) -> None:
        self.source = SlotLoader(assignment)
        self.source.build()
        self.replay_digest = ReplayDigest()
        self.kept: list[RestartPoint] = []
        self.points: dict[int, RestartPoint] = {}
        self.digests: dict[int, tuple[int, int]] = {}
        start(self.source, resume, lambda point, _: self.kept.append(point), self.seek)

    def seek(self, leg: Leg) -> None:
        replay(self.source, leg, self._seen)

    def _seen(self, batch: Any) -> None:
        self.source.count_replayed(batch, self.replay_digest)

    def take(self, batches: int) -> list[str]:
        source = self.source
        got: list[str] = []
        while len(got) < batches:
            if not source.is_open:
                self.kept.append(source.open_epoch())
            batch = source.next()
            if batch is END:
                continue
            self._seen(batch)
            got.append(str(batch))
            self.digests[source.position.total] = source.position.epoch, source.digest
            if source.saves_state:
                self.points[source.position.total] = RestartPoint.decode(
                    source.snapshot(source.position.total).encode()
                )
        return got

    def resumed(self, point: RestartPoint, *, value: Any = None, next_digest: int = 0, next_epoch: bool = False) -> Run:
        """Return the next launch, from the present position, which is reached from this restart point."""
        source = self.source
        assignment = records_pb2.WorkerAssignment()
        assignment.CopyFrom(source.assignment)
        place = source.position
        assignment.start.CopyFrom(
            records_pb2.BoxPosition(
                step=place.total,
                epoch=place.epoch,
                live=[0],
                slots=[records_pb2.SlotPosition(delivered=place.delivered, total=place.total)],
            )
        )
        assignment.resume.blob, assignment.resume.same_topology = "blob", True
        restart = decode_state(replace(point, history=source.history).encode())
        assert source.chain or not place.delivered
        part: dict[str, Any] = {**restart, "digest": source.digest, "chain": source.chain}  # type: ignore[dict-item]
        part |= {"next_digest": next_digest, "next_epoch": next_epoch, "samples": place.samples}
        return Run(assignment, {"aggregated": value, "strict": True, "slots": {0: part}})


# ---- pure loaders


@pytest.mark.parametrize("loader", PURE)
def test_an_epoch_is_a_function_of_its_number(loader: str) -> None:
    """Whatever the object did before, and whatever its class or state remembers."""
    run = Run(pure_assignment(loader))
    truth = run.take(40)
    for epoch in (1, 2):
        total = min(total for total, (of, _) in run.digests.items() if of == epoch) - 1
        fresh = SlotLoader(run.source.assignment)
        fresh.build()
        goal = EpochGoal.beginning(epoch, total, 7)
        reach(fresh, goal, goal.ways[0], lambda leg: None)
        assert fresh.position.as_list() == [epoch, 0, total, 7]
        assert [str(fresh.next()) for _ in range(6)] == truth[total : total + 6]
    orders = [truth[first : first + 12] for first in (0, 12)]
    if loader in ("draws_late", "delayed:never_the_same"):
        assert sorted(orders[0]) == sorted(orders[1])
        assert orders[0] != orders[1], "it is shuffled by the generators of the process"


@pytest.mark.parametrize("loader", PURE)
def test_a_resume_within_an_epoch_continues_the_stream(loader: str) -> None:
    assignment = pure_assignment(loader)
    ahead = Run(assignment)
    truth = ahead.take(60)
    run, at = Run(assignment), 0
    for until in (7, 30, 47):
        assert run.take(until - at) == truth[at:until]
        at = until
        epoch, digest = ahead.digests[at + 1]
        run = run.resumed(run.points[at], next_digest=digest, next_epoch=epoch > ahead.digests[at][0])
    assert run.take(60 - at) == truth[at:]


@pytest.mark.parametrize("wrong", ["next_digest", "chain", "next_epoch"])
def test_other_batches_than_saved_are_an_error(wrong: str) -> None:
    """The state is tried, then the beginning of the epoch; the error is that of the beginning."""
    run = Run(assignment_of("streams:stateful", 64))
    run.take(7)
    how = {
        "next_digest": "the loader yields another batch than the batch that followed batch 7",
        "next_epoch": "the loader yields another batch than the end of the epoch that followed batch 7",
        "chain": "the loader has not made the batches up to 7 again",
    }
    run.source.chain ^= wrong == "chain"
    with pytest.raises(ReplayMismatchError, match=f"made again from the beginning of its epoch, {how[wrong]}"):
        run.resumed(run.points[5], next_digest=wrong == "next_digest", next_epoch=wrong == "next_epoch")


def test_a_state_that_lies_within_the_replayed_batches_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Restored after batch 3, it makes five right batches. The chain compares all of them."""
    run = Run(assignment_of("delayed:looks_ahead", 5, 40))
    truth = [*run.take(20), *Run(assignment_of("delayed:looks_ahead", 5, 40)).take(40)[20:]]
    again = run.resumed(run.points[3])
    assert "restored from its state, the loader has not made the batches up to 20 again" in caplog.text
    assert again.take(20) == truth[20:]


def test_the_next_epoch_must_begin_as_it_did() -> None:
    """If the state was saved at the end of an epoch, the batch that followed is the first of the next one."""
    run = Run(assignment_of("counts_anew"))
    run.take(24)
    ahead = Run(assignment_of("counts_anew"))
    ahead.take(25)
    digest = ahead.digests[25][1]
    again = run.resumed(run.points[24], next_digest=digest, next_epoch=True)
    assert again.take(3) == [f"tensor([{number}])" for number in (1, 2, 3)]
    other = run.resumed(run.points[24], next_digest=digest ^ 1, next_epoch=True)
    with pytest.raises(ReplayMismatchError, match="epoch 2 does not begin with the batch with which it began"):
        other.take(1)


# ---- loaders of four methods


def test_a_state_by_arithmetic_needs_no_loader() -> None:
    run = Run(assignment_of("arithmetic"))
    run.take(9)
    assert run.source.capabilities.advances_state == "doubtful:Arithmetic"
    fields = {"loader": "doubtful:Arithmetic", "delivered": 9, "total": 9, "samples": 36, "digest": 7, "chain": 8}
    state = RestartPoint.decode(_advanced(run.points[2], run.source.assignment, fields))
    assert (state.state, state.position, state.digest) == (run.points[9].state, run.points[9].position, 7)
