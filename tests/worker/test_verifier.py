"""The order in which a slot's restart points are verified, and the results: with helper processes that only answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.proto.errors import DeadlineError, PenstockError, WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.slots.loader_findings import FIRST_DEPTH, LoaderFindings
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot
from penstock.worker.slots.verification import LAPSES, RestartPointVerifier

GOOD = {"same": True, "crossing": "", "took": 0.0}


class Bench:
    """A slot of a loader with two state methods, in its first epoch, with a snapshot after each fifth batch."""

    def __init__(self, answers: Callable[[int], Any], batches: int = 14, **capabilities: Any) -> None:
        """`answers`: to the verification of the restart point after so many batches: what it raises, or tells."""
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.failed: list[Any] = []
        self.crossing: list[str] = []
        self.findings = LoaderFindings()
        self.progress_page = ProgressPage.create()
        for total in range(1, batches + 1):
            self.make(total)
        self.store = SlotSnapshots()
        self._answers = answers
        known = records_pb2.LoaderCapabilities(**({"state_methods": 2} | capabilities))
        for total in range(0, batches if known.state_methods else 1, 5):
            self.store.add(
                StoredSnapshot(0, total, total, total, total == 0, 0, str(total).encode(), verified=total == 0), 0
            )
        slot = SimpleNamespace(
            assignment=records_pb2.WorkerAssignment(),
            fail=lambda error, lost: self.failed.append(error),
            findings=self.findings,
            host=SimpleNamespace(
                found_crossing=self._found,
                found_misleading=self._misleads,
                slot_changed=lambda: None,
                slots_here=lambda: 1,
            ),
            is_savable=True,
            progress_page=self.progress_page,
            abandoned={},
            log=logging.getLogger("penstock.worker"),
            name="box 0 slot 0",
            ready=asyncio.Event(),
            helper=self._scratch,
            step_of=lambda total: total,
            store=self.store,
            capabilities=known,
        )
        self.verifier = RestartPointVerifier(cast(Slot, slot))

    def _found(self, _: Any, crossing: str) -> None:
        self.findings.crossing = crossing
        self.crossing.append(crossing)

    def _misleads(self, _: Any) -> None:
        self.findings.misleads = True

    def make(self, total: int, epoch: int = 0) -> None:
        """The next batch goes out."""
        self.progress_page.record(total, epoch, 100 + total, total, delivered=total)

    async def _scratch(self, points: list[bytes], task: str, **fields: Any) -> ControlMessage:
        assert task == "verify"
        total = int(points[0])
        self.asked.append((total, fields | {"opened": [int(point) for point in points[1:]]}))
        answer = self._answers(total)
        if isinstance(answer, Exception):
            raise answer
        return ControlMessage("done", fields=answer)

    def at(self, total: int) -> StoredSnapshot:
        return next(point for point in self.store if point.total == total)

    def verify(self) -> int | None:
        """The next that it chooses; returns the batches before it, or None if there is none."""
        point = self.verifier._next()
        if point is None:
            return None
        asyncio.run(self.verifier.verify(point))
        return point.total


@pytest.mark.parametrize("lapse", [DeadlineError("late"), WorkerLostError("dead")])
def test_verification_without_verdict_is_repeated(lapse: PenstockError) -> None:
    answers = iter([lapse, GOOD])
    bench = Bench(lambda _: next(answers))
    first = bench.verify()
    assert first is not None
    assert (bench.at(first).verified, bench.at(first).refuted) == (False, False)
    assert bench.verify() == first
    assert bench.at(first).verified, "the second try came to a verdict"
    assert not bench.failed


def test_restart_point_is_given_up_after_lapses() -> None:
    bench = Bench(lambda _: DeadlineError("late"))
    chosen = [bench.verify() for _ in range(LAPSES + 1)]
    assert chosen[:-1] == [chosen[0]] * LAPSES
    assert chosen[-1] != chosen[0], "another one has its turn"
    assert bench.at(cast(int, chosen[0])).refuted
    assert not bench.failed
    assert not bench.findings.inexact, "it says nothing of the loader"


def test_beginning_without_a_result_is_retried() -> None:
    """A loader without methods is looked at once, and its save relies on that."""
    answers = iter([DeadlineError("late"), GOOD | {"same": False, "alike": False, "differs": 1, "what": "differs"}])
    bench = Bench(lambda _: next(answers), state_methods=0)
    assert [bench.verify(), bench.verify()] == [0, 0]
    assert bench.findings.unrepeatable is not None


@pytest.mark.parametrize("capabilities", [{"state_methods": 0}, {"state_methods": 2, "exact_states": True}])
def test_loader_checked_once_is_left_after_lapses(capabilities: dict[str, Any]) -> None:
    bench = Bench(lambda _: DeadlineError("late"), **capabilities)
    for _ in range(LAPSES):
        assert bench.verifier._verifiable
        bench.verify()
    assert bench.findings.checked
    assert not bench.verifier._verifiable or bench.verify() is None
    assert not bench.at(0).refuted


def test_some_verifications_reach_further() -> None:
    """Use half of the time for long verifications, which go as far back as there are restart points."""
    bench = Bench(lambda _: GOOD | {"took": 1.0}, batches=120)
    for total in range(121, 200):
        bench.make(total)
        bench.store.add(StoredSnapshot(0, total, total, total, False, 0, str(total).encode()), 0)
        bench.verify()
    compared = [len(fields["digests"]) for _, fields in bench.asked]
    assert compared[:9] == [16, 4, 4, 32, 4, 4, 64, 4, 4], "each takes as long as those before it"
    assert set(compared[9:]) == {4, 128}


def test_first_verification_compares_known_batches() -> None:
    bench = Bench(lambda _: GOOD, batches=14)
    assert bench.verify() == 10
    assert list(bench.asked[0][1]["digests"]) == ["11", "12", "13", "14"]
    assert bench.findings.depth == FIRST_DEPTH, "that was no far-reaching one"


def test_late_mismatch_ends_the_use_of_all_states() -> None:
    """Use no other state either: those verified by four batches would do the same."""
    wrong = GOOD | {"same": False, "alike": True, "what": "yields another batch"}
    bench = Bench(lambda total: wrong | {"differs": total + 6}, batches=40)
    bench.verify()
    assert bench.findings.misleads
    assert "Such states are not used" in bench.findings.not_used
    assert not bench.verifier._verifiable
    before = [point for point in bench.store if not point.start]
    assert before
    for point in before:
        point.verified = True
        assert not Slot.usable(cast(Slot, bench.verifier._slot), point)
    bench.at(0).start = True
    assert Slot.usable(cast(Slot, bench.verifier._slot), bench.at(0))
    near = Bench(lambda total: wrong | {"differs": total + 2}, batches=40)
    near.verify()
    assert not near.findings.misleads, "that one was wrong, and others may be right"


def test_verification_crosses_the_ends_of_epochs() -> None:
    bench = Bench(lambda _: GOOD | {"crossing": "kept"}, batches=12)
    bench.progress_page.end(0, 12)
    for total in range(13, 19):
        bench.make(total, epoch=1)
    bench.progress_page.end(1, 18)
    bench.make(19, epoch=2)
    bench.store.add(StoredSnapshot(1, 1, 13, 13, False, 0, b"13"), 0)
    assert bench.verifier._crossing(list(bench.store)) is bench.at(10)
    bench.verify()
    total, fields = bench.asked[0]
    assert total == 10
    assert {epoch for epoch, _ in fields["digests"].values()} == {0, 1, 2}
    assert (fields["crossing"], fields["opened"], bench.crossing) == ("", [13], ["kept"])
    bench.verifier._slot.abandoned[1] = 18
    assert list(bench.verifier._followers(bench.at(10), 16))[-1] == "18", (
        "left there, by a loop that is not asked again"
    )


def test_batches_beyond_abandon_are_not_compared() -> None:
    """Ignore batches made ahead of the loop: they stay in the progress page until overwritten."""
    bench = Bench(lambda _: GOOD, batches=30)
    bench.progress_page.cut(0, 22)
    bench.progress_page.set_position(22, 0, 22)
    bench.make(23, epoch=1)
    assert list(bench.verifier._followers(bench.at(20), 16)) == ["21", "22", "23"]
