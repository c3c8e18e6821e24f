"""The stream digest: the chain of a box's digests goes with its position, into every state and out of it again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mapped
import pytest
import streams
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.states.saved_state import read
from penstock.proto import errors


def box(appliance: Appliance, number: int, boxes: int, workers: int, job: str) -> Appliance:
    """Return the appliance of one of a job's boxes, on the running daemons."""
    return beside(appliance, box=number, num_boxes=boxes, num_workers_per_box=workers, job=job)


@pytest.mark.parametrize("lead", [-3])
def test_a_state_knows_the_record_of_every_box(appliance: Appliance, lead: int) -> None:
    """Box 1 is behind the step, or beyond it, when box 0 asks."""
    reached, asked = threading.Event(), threading.Event()

    def train(number: int) -> tuple[dict[int, int | None], Any]:
        loader, records = DataLoader(streams.shared, 80), {}
        with box(appliance, number, 2, 2, f"lead{lead}") as one_of_two:
            executor = DataExecutor(loader, num_steps=15, appliance=one_of_two)
            state = None
            for _ in executor:
                records[executor.step] = executor.digest
                if number == 0 and executor.step == 8:
                    assert reached.wait(30)
                    state = loader.state_dict()
                    asked.set()
                if number == 1 and executor.step == 8 + lead:
                    reached.set()
                    assert asked.wait(30)
            return records, state

    with ThreadPoolExecutor(2) as pool:
        (one, state), (two, _) = pool.map(train, range(2))
    assert [position.chain for position in read(state).positions] == [one[8], two[8]]
    assert one[8] != two[8]
    assert state["done"] == [4, 4, 4, 4]


def test_continues_over_workers_ends_with_boxes(appliance: Appliance) -> None:
    loader = DataLoader(streams.shared, 40)
    with box(appliance, 0, 1, 2, "shapes") as alone:
        executor = DataExecutor(loader, num_steps=6, appliance=alone)
        assert len(list(executor)) == 6
        state, record = loader.state_dict(), executor.digest

    def resumed(workers: int, boxes: int) -> int | None:
        again = DataLoader(streams.shared, 40)
        again.load_state_dict(state)
        with box(appliance, 0, boxes, workers, f"shapes-{workers}-{boxes}") as other:
            executor = DataExecutor(again, num_steps=1, appliance=other)
            assert len(list(executor)) == 1
            return executor.digest

    same, other, boxes = resumed(2, 1), resumed(3, 1), resumed(1, 2)
    assert record
    assert same
    assert other
    assert not boxes, "two boxes have no one record to go on with"


def test_by_rows_it_is_equal_on_any_boxes(appliance: Appliance) -> None:
    """Parts of all boxes add up: 1 box with 3 workers, saved; then 2 boxes with 1; saved; then 3 with 2."""

    def train(boxes: int, workers: int, steps: int, state: Any, job: str) -> tuple[int, Any]:
        def one(number: int) -> tuple[int | None, Any]:
            loader = DataLoader(mapped.mapped, global_batch_size=7, keys=None)
            if state is not None:
                loader.load_state_dict(state)
            digest: Any = "rows" if state is None else None  # a loaded state says it
            with beside(
                appliance, box=number, num_boxes=boxes, num_workers_per_box=workers, job=job, digest=digest
            ) as box:
                executor = DataExecutor(loader, num_steps=steps, appliance=box)
                assert len(list(executor)) == steps
                return executor.digest, loader.state_dict()

        with ThreadPoolExecutor(boxes) as pool:
            parts = list(pool.map(one, range(boxes)))
        digests = [digest for digest, _ in parts]
        assert None not in digests
        return sum(digests) % 2**64, parts[-1][1]  # type: ignore[arg-type]

    whole, _ = train(2, 2, 12, None, "rows-whole")
    first, state = train(1, 3, 3, None, "rows-1")
    second, state = train(2, 1, 5, state, "rows-2")
    third, state = train(3, 2, 4, state, "rows-3")
    assert third == whole
    assert len({first, second, third}) == 3
    assert sum(position.chain or 0 for position in read(state).positions) % 2**64 == whole
    other, _ = train(1, 2, 12, None, "rows-alone")
    assert other == whole


def test_in_full_it_sees_every_byte(appliance: Appliance) -> None:
    def record(digest: Any, flip: int) -> int | None:
        with beside(appliance, num_workers_per_box=2, digest=digest) as digesting:
            executor = DataExecutor(DataLoader(streams.large, 3, flip), appliance=digesting)
            assert len(list(executor)) == 6
            return executor.digest

    at = (1 << 19) + 3  # between two words of the sample
    assert record("sample", at) == record(None, -1)
    assert record("full", at) != record("full", -1)


def test_a_state_says_how_its_digests_were_made(appliance: Appliance) -> None:
    loader = DataLoader(streams.stateful, 48)
    with beside(appliance, num_workers_per_box=2, digest="full") as full:
        whole = DataExecutor(loader, num_steps=5, appliance=full)
        assert len(list(whole)) == 5
        state = loader.state_dict()
        assert len(list(DataExecutor(loader, num_steps=3, appliance=full))) == 3
        digest = whole.digest
    again = DataLoader(streams.stateful, 48)
    again.load_state_dict(state)
    with beside(appliance, num_workers_per_box=2) as undecided:
        executor = DataExecutor(again, num_steps=3, appliance=undecided)
        assert len(list(executor)) == 3
        assert executor.digest == digest
        assert read(again.state_dict()).full_digest
    again.load_state_dict(state)
    with (
        beside(appliance, num_workers_per_box=2, digest="sample") as sampling,
        pytest.raises(errors.StateMismatchError, match="digest must be 'full'"),
    ):
        iter(DataExecutor(again, appliance=sampling))
