"""Restart points: which are verified, what a resume falls back on, and how a restored loader begins its next epoch."""

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
from penstock.worker.loader.crossing_kinds import FRESH, KEPT, REPLAY
from penstock.worker.loader.restart_plan import Leg
from penstock.worker.loader.restart_points import END, RestartPoint
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import replay
from penstock.worker.runner.replayer import _advanced, _verify


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


class Run:
    """A slot's stream, with the base after each batch."""

    def __init__(self, assignment: records_pb2.WorkerAssignment, resume: dict[str, Any] | None = None) -> None:
        self.source = RestorableLoader(assignment)
        self.source.build()
        self.replay_digest = ReplayDigest()
        self.kept: list[RestartPoint] = []
        self.points: dict[int, RestartPoint] = {}
        self.digests: dict[int, tuple[int, int]] = {}
        self.generators: dict[int, int] = {}
        start(self.source, resume, lambda point, _: self.kept.append(point), self._seek)

    def _seek(self, leg: Leg) -> None:
        replay(self.source, leg, self._seen)

    def _seen(self, batch: Any) -> None:
        self.source.digest, samples = self.replay_digest.take(batch)
        self.source.position.samples += samples

    def take(self, batches: int) -> list[list[int]]:
        source = self.source
        got: list[list[int]] = []
        while len(got) < batches:
            if not source.is_open:
                self.kept.append(source.open_epoch())
            batch = source.next()
            if batch is END:
                continue
            self._seen(batch)
            got.append((batch["x"] if isinstance(batch, dict) else batch).tolist())
            self.digests[source.position.total] = source.position.epoch, source.digest
            self.generators[source.position.total] = source.rng_hash()
            if source.saves_state:
                self.points[source.position.total] = RestartPoint.decode(
                    source.snapshot(source.position.total).encode()
                )
        return got

    def verify(self, point: RestartPoint, count: int = 4, known: str = "") -> dict[str, Any]:
        behind = range(point.position.total + 1, point.position.total + 1 + count)
        digests = {str(n): self.digests[n] for n in behind if n in self.digests}
        first = {str(n): self.digests[n] for n in range(1, 5) if n in self.digests}
        helper = RestorableLoader(self.source.assignment)
        helper.build()
        fields = {
            "digests": digests,
            "early": first,
            "left": False,
            "generators": self.generators[point.position.total + 1],
            "crossing": known,
        }
        beyond = [n for n in behind if n in self.digests and self.digests[n][0] > point.position.epoch]
        return _verify(helper, point, fields, ReplayDigest(), *(self.points[n] for n in beyond[:1]))

    def resumed(self, point: RestartPoint, *, value: Any = None, next_digest: int = 0, next_epoch: bool = False) -> Run:
        """The next launch, from here, over this restart point."""
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
        part = {**restart, "digest": source.digest, "next_digest": next_digest, "samples": place.samples}  # type: ignore[dict-item]
        part["next_epoch"] = next_epoch
        return Run(assignment, {"aggregated": value, "strict": True, "slots": {0: part}})


def test_each_restart_point_is_verified_by_itself() -> None:
    run = Run(assignment_of("twice"))
    run.take(20)
    assert run.verify(run.points[10])["same"]
    later = run.resumed(run.points[10])
    assert later.take(20) == [[number] for number in range(20, 40)]
    found = later.verify(later.points[30])
    assert not found["same"], "taken of a restored loader, it has counted twice"
    assert found["alike"]
    assert later.resumed(run.points[10]).take(3) == [[40], [41], [42]], "what was verified, and the count"


@pytest.mark.parametrize(
    ("complete", "message"),
    [
        (True, "replayed from the beginning up to batch 7 .* The loader is not deterministic.*start a new run"),
        (False, r"resumed from its state after batch 7 .* Its state_dict\(\) must describe.*start a new run"),
    ],
)
def test_wrong_next_batch_names_the_way_to_it(complete: bool, message: str) -> None:
    """`strict=False` is no remedy here: it has an effect only for a loader with four state methods."""
    run = Run(assignment_of("streams:stateful", 64))
    run.take(7)
    run.source.history = replace(run.source.history, complete=complete)
    with pytest.raises(ReplayMismatchError, match=message):
        run.resumed(run.points[7], next_digest=1)


@pytest.mark.parametrize(
    ("loader", "crossing"), [("from_the_middle", FRESH), ("counts_epochs", KEPT), ("forgets", REPLAY)]
)
def test_verifying_over_an_end_finds_the_crossing(loader: str, crossing: str) -> None:
    run = Run(assignment_of(loader))
    run.take(20)
    assert run.verify(run.points[9], 7) == {"same": True, "crossing": crossing}


@pytest.mark.parametrize("loader", ["from_the_middle", "counts_epochs", "orders_shards", "forgets", "streams:stateful"])
@pytest.mark.parametrize("known", [False, True])
def test_resumed_loader_crosses_ends_correctly(loader: str, known: bool) -> None:
    assignment = assignment_of(loader, *((64,) if ":" in loader else ()))
    truth = Run(assignment).take(60)
    run = Run(assignment)
    assert run.take(7) == truth[:7]
    if known:
        ahead = Run(assignment)
        ahead.take(20)
        run.source.learn_crossing(ahead.verify(ahead.points[9], 12)["crossing"])
    second = run.resumed(run.points[7])
    assert second.take(23) == truth[7:30], "over an end"
    third = second.resumed(second.kept[-1])
    assert third.take(30) == truth[30:]
    if not known:
        expected = {"counts_epochs": KEPT, "orders_shards": KEPT, "forgets": REPLAY}.get(loader, FRESH)
        assert third.source.history.crossing == expected, "found out once, and carried along"


@pytest.mark.parametrize("loader", ["draws_twice", "queues_orders", "never_the_same"])
@pytest.mark.parametrize("known", [False, True])
def test_epoch_after_next_is_right_every_time(loader: str, known: bool) -> None:
    """The next one is right either way; what the loader is there shows that those after it will not be."""
    assignment = assignment_of(f"delayed:{loader}")
    truth = Run(assignment).take(90)
    run = Run(assignment)
    assert run.take(7) == truth[:7]
    ahead = Run(assignment)
    ahead.take(20)
    crossing = ahead.verify(ahead.points[9], 12)["crossing"]
    assert crossing == REPLAY
    if known:
        run.source.learn_crossing(crossing)
    for until in (31, 64, 90):
        at = run.source.position.total
        run = run.resumed(run.points[at])
        assert run.take(until - at) == truth[at:until]


def test_verifying_later_epochs_corrects_crossing() -> None:
    run = Run(assignment_of("delayed:grows"))
    run.take(60)
    assert run.verify(run.points[9], 12)["crossing"] == KEPT, "the next two epochs are the same in all ways"
    assert run.verify(run.points[9], 20, KEPT)["crossing"] == KEPT
    assert run.verify(run.points[20], 40, KEPT)["crossing"] == REPLAY
    streams = Run(assignment_of("streams:stateful", 64))
    streams.take(60)
    found = streams.verify(streams.points[9], 50)
    assert found["same"]
    assert found["crossing"] in (KEPT, FRESH), "its orders are drawn from generators that are saved"


def test_longer_verification_finds_later_errors() -> None:
    run = Run(assignment_of("delayed:looks_ahead"))
    run.take(30)
    assert run.verify(run.points[9])["same"]
    found = run.verify(run.points[9], 16)
    assert (found["same"], found["differs"], found["alike"]) == (False, 15, True)


def test_misleading_loader_is_counted_from_start() -> None:
    truth = Run(assignment_of("delayed:looks_ahead", 3, 20)).take(70)
    run = Run(assignment_of("delayed:looks_ahead", 3, 20))
    run.source.counts_from = RestartPoint.decode(run.kept[0].encode())
    assert run.take(34) == truth[:34]
    assert [run.points[total].position.total for total in (5, 34)] == [0, 0]
    assert run.kept[-1].replayed_from is not None, "an epoch's start, too"
    later = run.resumed(run.source.snapshot(34))
    assert later.take(36) == truth[34:]


def test_state_at_end_is_compared_with_next_epoch() -> None:
    truth = Run(assignment_of("counts_anew"))
    batches = truth.take(40)
    run = Run(assignment_of("counts_anew"))
    run.take(24)
    again = run.resumed(run.points[24], next_digest=truth.digests[25][1], next_epoch=True)
    assert again.take(16) == batches[24:]


def test_loader_is_dropped_before_next_is_made() -> None:
    """Drop the loader first, because it may hold a file that can be opened once in a process."""
    assignment = assignment_of("only_one")
    run = Run(assignment)
    run.take(7)
    point, run.source._loader, run.source._iterator = run.points[7], None, None
    again = run.resumed(point)
    assert again.take(14) == [[number % 12] for number in range(7, 21)], "over an end, with another loader"
    again.source.restore(point)
    assert again.take(2) == [[7], [8]]


def test_epoch_start_of_a_lazy_loader_fails() -> None:
    """Refuse the epoch start of a loader that begins an epoch in its first next(), and so cannot record that it was
    asked to."""
    run = Run(assignment_of("streams:fresh"))
    run.take(12)
    assert not run.verify(run.kept[1])["same"]
    assert run.verify(run.points[9])["same"]


def test_other_random_numbers_fail_verification() -> None:
    """Its batches are the same, and those of the next epoch would not be."""
    run = Run(assignment_of("draws_late"))
    run.take(30)
    assert run.verify(run.kept[1])["what"] == "draws other random numbers"
    assert run.verify(run.points[15])["same"]
    assert run.verify(run.points[10])["crossing"] in (KEPT, FRESH)
    for shuffled in ("streams:stateful", "streams:own_generator"):
        run = Run(assignment_of(shuffled, *((True,) if "own" in shuffled else ())))
        run.take(16)
        assert run.verify(run.kept[1])["same"]
        assert run.verify(run.points[8])["same"]


def test_late_count_is_no_error_but_no_repeat_is() -> None:
    run = Run(assignment_of("streams:counts_late"))
    run.take(10)
    found = run.verify(run.points[3])
    assert (found["same"], found["alike"], found["differs"]) == (False, True, 4)
    run.digests = {total: (epoch, digest ^ 1) for total, (epoch, digest) in run.digests.items()}
    assert not run.verify(run.points[3])["alike"]


# -------------------------------------------------------------------------------------------- loaders of four methods


def test_runner_replaced_later_counts_on() -> None:
    run = Run(assignment_of("streamed"))
    run.take(10)
    second = run.resumed(run.source.snapshot(10), value={"all_samples": 40})
    got = second.take(10)
    again = RestorableLoader(second.source.assignment)
    again.build()
    again.resume = second.source.resume
    again.restore(RestartPoint.decode(second.kept[0].encode()))
    replayed: list[list[int]] = []

    def seen(batch: Any) -> None:
        replayed.append(batch.tolist())
        again.position.samples += len(batch)

    assert again.seek(20, 0, seen)
    assert replayed == got
    assert again.state(20) == second.source.state(20) == ({"samples": 80}, True)


def test_wrong_methods_fail_before_first_batch() -> None:
    truth = Run(assignment_of("misled"))
    batches = truth.take(24)
    run = Run(assignment_of("misled"))
    run.take(10)
    second = run.resumed(run.source.snapshot(10), value={"all_samples": 40}, next_digest=truth.digests[11][1])
    assert second.take(10) == batches[10:20], "made again from the beginning"
    third = second.resumed(second.source.snapshot(20), value={"all_samples": 80}, next_digest=truth.digests[21][1])
    assert third.take(4) == batches[20:]


def test_a_state_by_arithmetic_needs_no_loader() -> None:
    run = Run(assignment_of("arithmetic"))
    run.take(9)
    assert run.source.capabilities.advances_state == "doubtful:Arithmetic"
    fields = {"loader": "doubtful:Arithmetic", "delivered": 9, "total": 9, "samples": 36, "digest": 7}
    state = RestartPoint.decode(_advanced(run.points[2], run.source.assignment, fields))
    assert (state.state, state.position, state.digest) == (run.points[9].state, run.points[9].position, 7)
