"""A map-style dataset through coordinator, worker daemons and lanes: one order and one randomness for any topology."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mapped import SAMPLES, mapped
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import InputFnError, NotRestartableError

OPTIONS: dict[str, Any] = {"global_batch_size": 12, "tail": "carry"}
Row = tuple[int, tuple[float, ...], str]


def rows_of(batch: Any) -> list[Row]:
    noise = [tuple(row) for row in batch["noise"].tolist()]
    return list(zip(batch["number"].tolist(), noise, batch["key"], strict=True))


def train(
    appliance: Appliance, job: str, shape: tuple[int, int], steps: int, state: Any = None, **options: Any
) -> tuple[list[list[Row]], Any]:
    """Global batches in the order of the epoch, and the state behind them."""
    boxes, workers = shape

    def one(box: int) -> tuple[list[list[Row]], Any]:
        loader = DataLoader(mapped, **OPTIONS, **options)
        if state is not None:
            loader.load_state_dict(state)
        with beside(appliance, box=box, num_boxes=boxes, num_workers_per_box=workers, job=job) as here:
            rows = [rows_of(batch) for batch in DataExecutor(loader, num_steps=steps, appliance=here)]
            return rows, loader.state_dict()

    with ThreadPoolExecutor(boxes) as pool:
        rows, states = zip(*pool.map(one, range(boxes)), strict=True)
    return [
        [step[at % boxes][at // boxes] for at in range(sum(map(len, step)))] for step in zip(*rows, strict=True)
    ], states[0]


def test_workers_boxes_and_processes_come_and_go(appliance: Appliance) -> None:
    """Read in a plain process first; then over the ends of two epochs, each leg on another topology."""
    plain = mapped(**OPTIONS)
    whole = [rows_of(batch) for _ in range(3) for batch in plain]
    assert len(whole) * 12 == 3 * SAMPLES
    legs = [((1, 2), 11), ((3, 1), 8)]
    got: list[list[Row]] = []
    state = None
    for number, (shape, steps) in enumerate(legs):
        rows, state = train(appliance, f"map{number}", shape, steps, state)
        got += rows
    assert got == whole[: len(got)]
    # What a batch's key says, anybody can read again.
    samples = [plain.restore_sample(key) for _, _, key in got[10]]
    assert [(sample["number"], tuple(sample["noise"].tolist())) for sample in samples] == [row[:2] for row in got[10]]
    # A loss spike behind the next step: the run goes around its samples.
    first = len(got) * 12
    rows, _ = train(appliance, "around", (2, 2), 2, state, skip=[range(first + 12, first + 36)])
    assert rows == [whole[len(got)], whole[len(got) + 3]]


def test_error_names_the_sample_in_the_job(appliance: Appliance) -> None:
    with pytest.raises(InputFnError, match=r"raised by Augmented for sample 5 \(epoch 0, position 5\)"):
        train(appliance, "broken", (1, 1), 20, shuffle=False, broken=5)


@pytest.mark.parametrize("when", ["before the run", "at the first step's eve"])
def test_state_of_step_0_keeps_the_seeds_order(appliance: Appliance, when: str) -> None:
    """Keep the order of a loader that takes its seed from the run, and not from an argument."""
    first = DataLoader(mapped, seed=None, **OPTIONS)
    with beside(appliance, seed=None) as one:
        state = first.state_dict() if when == "before the run" else None
        rows = [rows_of(batch) for batch in DataExecutor(first, num_steps=3, appliance=one)]
        state = state or first.state_at(0)
    again = DataLoader(mapped, seed=None, **OPTIONS)
    again.load_state_dict(state)
    with beside(appliance, seed=None) as other:
        resumed = [rows_of(batch) for batch in DataExecutor(again, num_steps=3, appliance=other)]
    assert resumed == rows
    assert len(resumed) == 3


def test_synthetic_input_repeats_and_has_no_state(appliance: Appliance) -> None:
    loader = DataLoader(mapped, **OPTIONS)
    with beside(appliance, num_workers_per_box=2) as plain:
        real = [rows_of(batch) for batch in DataExecutor(loader, num_steps=3, appliance=plain)]
        state = loader.state_dict()
    loader = DataLoader(mapped, **OPTIONS)
    with beside(appliance, num_workers_per_box=2, synthetic=True) as repeating:
        repeated = [rows_of(batch) for batch in DataExecutor(loader, num_steps=7, appliance=repeating)]
        with pytest.raises(NotRestartableError, match=r"synthetic=True.* repeats the first batch of each worker"):
            loader.state_dict()
        resumed = DataLoader(mapped, **OPTIONS)
        resumed.load_state_dict(state)
        with pytest.raises(NotRestartableError, match=r"Appliance\(synthetic=True\) cannot resume"):
            next(iter(DataExecutor(resumed, appliance=repeating)))
    assert repeated == [*real[:2] * 3, real[0]]
