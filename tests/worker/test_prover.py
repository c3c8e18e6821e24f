"""Which restart point a slot's prover chooses, and what comes of a proof: with helper processes that only answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.proto.errors import DeadlineError, PenstockError, WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.worker.control import Message
from penstock.worker.ledger import Ledger
from penstock.worker.proofs import LAPSES, Findings, Prover
from penstock.worker.slot import Slot
from penstock.worker.snapshots import Kept, SnapshotStore

GOOD = {"same": True, "rewinds": "", "took": 0.0}


class Bench:
    """A slot of a loader with two state methods, in its first epoch, with a snapshot after each fifth batch."""

    def __init__(self, answers: Callable[[int], Any], batches: int = 40, **traits: Any) -> None:
        """`answers`: to the proof of the restart point after so many batches: what it raises, or tells."""
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.failed: list[Any] = []
        self.rewinds: list[str] = []
        self.findings = Findings()
        self.ledger = Ledger.create()
        for total in range(1, batches + 1):
            self.ledger.record(total, 0, 100 + total, total, delivered=total)
        self.store = SnapshotStore()
        self._answers = answers
        known = records_pb2.LoaderTraits(**({"state_methods": 2} | traits))
        for total in range(0, batches if known.state_methods else 1, 5):
            self.store.add(Kept(0, total, total, total, total == 0, 0, str(total).encode(), proven=total == 0), 0)
        slot = SimpleNamespace(
            assignment=records_pb2.WorkerAssignment(),
            fail=lambda error, lost: self.failed.append(error),
            findings=self.findings,
            host=SimpleNamespace(found_rewinds=self._found, slots_here=lambda: 1),
            is_savable=True,
            ledger=self.ledger,
            left={},
            log=logging.getLogger("penstock.worker"),
            name="box 0 slot 0",
            ready=asyncio.Event(),
            scratch=self._scratch,
            step_of=lambda total: total,
            store=self.store,
            traits=known,
        )
        self.prover = Prover(cast(Slot, slot))

    def _found(self, _: Any, rewinds: str) -> None:
        self.findings.rewinds = rewinds
        self.rewinds.append(rewinds)

    async def _scratch(self, bases: list[bytes], task: str, **fields: Any) -> Message:
        assert task == "prove"
        total = int(bases[0])
        self.asked.append((total, fields))
        answer = self._answers(total)
        if isinstance(answer, Exception):
            raise answer
        return Message("done", fields=answer)

    def at(self, total: int) -> Kept:
        return next(base for base in self.store if base.total == total)

    def prove(self) -> int | None:
        """The next that it chooses; returns the batches before it, or None if there is none."""
        base = self.prover._next()
        if base is None:
            return None
        asyncio.run(self.prover.prove(base))
        return base.total


@pytest.mark.parametrize("lapse", [DeadlineError("late"), WorkerLostError("dead")])
def test_proof_without_a_verdict_is_tried_again(lapse: PenstockError) -> None:
    answers = iter([lapse, GOOD])
    bench = Bench(lambda _: next(answers))
    first = bench.prove()
    assert first is not None
    assert (bench.at(first).proven, bench.at(first).refuted) == (False, False)
    assert bench.prove() == first
    assert bench.at(first).proven, "the second try came to a verdict"
    assert not bench.failed


def test_restart_point_is_given_up_after_the_last_lapse() -> None:
    bench = Bench(lambda _: DeadlineError("late"))
    chosen = [bench.prove() for _ in range(LAPSES + 1)]
    assert chosen[:-1] == [chosen[0]] * LAPSES
    assert chosen[-1] != chosen[0], "another one has its turn"
    assert bench.at(cast(int, chosen[0])).refuted
    assert not bench.failed
    assert not bench.findings.inexact, "it says nothing of the loader"


def test_beginning_without_a_verdict_is_tried_again() -> None:
    """A loader without methods is looked at once, and its save relies on that."""
    answers = iter([DeadlineError("late"), GOOD | {"same": False, "alike": False, "differs": 1, "what": "differs"}])
    bench = Bench(lambda _: next(answers), state_methods=0)
    assert [bench.prove(), bench.prove()] == [0, 0]
    assert bench.findings.unrepeatable is not None


@pytest.mark.parametrize("traits", [{"state_methods": 0}, {"state_methods": 2, "exact_states": True}])
def test_loader_that_is_looked_at_once_is_left_alone_after_the_last_lapse(traits: dict[str, Any]) -> None:
    bench = Bench(lambda _: DeadlineError("late"), **traits)
    for _ in range(LAPSES):
        assert bench.prover._provable
        bench.prove()
    assert bench.findings.checked
    assert not bench.prover._provable or bench.prove() is None
    assert not bench.at(0).refuted
