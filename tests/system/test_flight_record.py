"""The stream digest: the chain of a box's digests goes with its position, into every state and out of it again.

test_large_batches.py shows that runners make the same digests as this process."""

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
from penstock.client.testing import FakeAppliance
from penstock.proto import errors


def box(appliance: Appliance, number: int, boxes: int, workers: int, job: str) -> Appliance:
    """Return the appliance of one of a job's boxes, on the running daemons."""
    return beside(appliance, box=number, num_boxes=boxes, num_workers_per_box=workers, job=job)


def test_a_state_knows_the_record_of_every_box(appliance: Appliance) -> None:
    """Box 1 is behind the step when box 0 asks."""
    reached, asked = threading.Event(), threading.Event()

    def train(number: int) -> tuple[dict[int, int | None], Any]:
        loader, records = DataLoader(streams.shared, 80), {}
        with box(appliance, number, 2, 2, "lead") as one_of_two:
            executor = DataExecutor(loader, num_steps=15, appliance=one_of_two)
            state = None
            for _ in executor:
                records[executor.step] = executor.digest
                if number == 0 and executor.step == 8:
                    assert reached.wait(30)
                    state = loader.state_dict()
                    asked.set()
                if number == 1 and executor.step == 5:
                    reached.set()
                    assert asked.wait(30)
            return records, state

    with ThreadPoolExecutor(2) as pool:
        (one, state), (two, _) = pool.map(train, range(2))
    assert [position.chain for position in read(state).positions] == [one[8], two[8]]
    assert one[8] != two[8]
    assert state["done"] == [4, 4, 4, 4]


def test_by_rows_it_is_equal_on_any_boxes() -> None:
    """Parts of all boxes add up: 1 box with 3 workers, saved; then 2 boxes with 1; saved; then 3 with 2."""

    def train(boxes: int, workers: int, steps: int, state: Any) -> tuple[int, Any]:
        def one(number: int) -> tuple[int | None, Any]:
            loader = DataLoader(mapped.mapped, global_batch_size=7, keys=None)
            if state is not None:
                loader.load_state_dict(state)
            digest: Any = "rows" if state is None else None  # a loaded state says it
            shape: Any = {"box": number, "num_boxes": boxes, "num_workers_per_box": workers}
            with FakeAppliance(**shape, seed=7, digest=digest) as box:
                executor = DataExecutor(loader, num_steps=steps, appliance=box)
                assert len(list(executor)) == steps
                return executor.digest, loader.state_dict()

        parts = [one(number) for number in range(boxes)]
        digests = [digest for digest, _ in parts]
        assert None not in digests
        return sum(digests) % 2**64, parts[-1][1]  # type: ignore[arg-type]

    whole, _ = train(2, 2, 12, None)
    first, state = train(1, 3, 3, None)
    second, state = train(2, 1, 5, state)
    third, state = train(3, 2, 4, state)
    assert third == whole
    assert len({first, second, third}) == 3
    assert sum(position.chain or 0 for position in read(state).positions) % 2**64 == whole
    other, _ = train(1, 2, 12, None)
    assert other == whole


def test_in_full_it_sees_every_byte() -> None:
    def record(digest: Any, flip: int) -> int | None:
        with FakeAppliance(num_workers_per_box=2, seed=7, digest=digest) as digesting:
            executor = DataExecutor(DataLoader(streams.large, 3, flip), appliance=digesting)
            assert len(list(executor)) == 6
            return executor.digest

    at = (1 << 19) + 3  # between two words of the sample
    assert record("sample", at) == record(None, -1)
    assert record("full", at) != record("full", -1)


def test_a_state_says_how_its_digests_were_made() -> None:
    loader = DataLoader(streams.stateful, 48)
    with FakeAppliance(num_workers_per_box=2, seed=7, digest="full") as full:
        whole = DataExecutor(loader, num_steps=5, appliance=full)
        assert len(list(whole)) == 5
        state = loader.state_dict()
        assert len(list(DataExecutor(loader, num_steps=3, appliance=full))) == 3
        digest = whole.digest
    again = DataLoader(streams.stateful, 48)
    again.load_state_dict(state)
    with FakeAppliance(num_workers_per_box=2, seed=7) as undecided:
        executor = DataExecutor(again, num_steps=3, appliance=undecided)
        assert len(list(executor)) == 3
        assert executor.digest == digest
        assert read(again.state_dict()).full_digest
    again.load_state_dict(state)
    with (
        FakeAppliance(num_workers_per_box=2, seed=7, digest="sample") as sampling,
        pytest.raises(errors.StateMismatchError, match="digest must be 'full'"),
    ):
        iter(DataExecutor(again, appliance=sampling))
