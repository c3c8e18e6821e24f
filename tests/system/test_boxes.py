"""Several boxes of a job: what one is told of another."""

from __future__ import annotations

import re
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import streams
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader


def box(running: Appliance, number: int, boxes: int, workers: int, job: str) -> Appliance:
    return beside(running, box=number, num_boxes=boxes, num_workers_per_box=workers, job=job)


def together(boxes: int, train: Callable[[int], Any]) -> list[Any]:
    """Each box's loop in a thread of its own; their results in order."""
    with ThreadPoolExecutor(boxes) as pool:
        return list(pool.map(train, range(boxes)))


def is_apart(loader: DataLoader, named: bool = False) -> bool:
    """Whether the coordinator has told this box that another one is in a later epoch, or has `named` it otherwise."""
    other = loader._session.run.box_apart  # type: ignore[union-attr]
    return other is not None and other.HasField("label") == named


def wait_until(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not there() and time.monotonic() < until:
        select.select([], [], [], 0.05)


def test_box_with_an_early_epoch_end_is_announced(appliance: Appliance) -> None:
    ended = threading.Event()

    def train(number: int) -> int:
        loader = DataLoader(streams.uneven, [3, 9])
        with box(appliance, number, 2, 1, "uneven") as own:
            steps = iter(DataExecutor(loader, appliance=own))
            taken = 0
            for _ in steps:
                taken += 1
                if number == 1 and taken == 4:
                    assert ended.wait(30)
                    until = time.monotonic() + 10
                    while not loader._session.run.ended_boxes and time.monotonic() < until:  # type: ignore[union-attr]
                        select.select([], [], [], 0.05)
            if number == 0:
                ended.set()
            return taken

    with pytest.warns(UserWarning, match="the epoch of box 0 ended at step 3, but box 1 continues"):
        assert together(2, train) == [3, 9]


def test_boxes_with_an_equal_first_batch_are_warned(appliance: Appliance) -> None:
    """Their loader reads its assignment, but not the box: all boxes train on the same rows."""

    def train(number: int) -> None:
        loader = DataLoader(streams.same_on_all_boxes, 400)
        with box(appliance, number, 2, 1, "twins") as own:
            for step, _ in enumerate(DataExecutor(loader, num_steps=400, appliance=own), 1):
                if step == 3:
                    wait_until(lambda: loader._session.run.twin is not None)  # type: ignore[union-attr]

    with pytest.warns(UserWarning, match="got the same first batch") as told:
        together(2, train)
    words = {str(each.message).partition(": ")[2] for each in told}
    assert {text[:15] for text in words} == {"box 0 and box 1", "box 1 and box 0"}
    assert all(name in text for text in words for name in ("RANK", "box=", "num_boxes="))


def test_boxes_in_different_epochs_are_named_once(appliance: Appliance, caplog: pytest.LogCaptureFixture) -> None:
    begun, told = threading.Event(), threading.Event()

    def train(number: int) -> None:
        loader = DataLoader(streams.uneven, [40, 40])
        with box(appliance, number, 2, 1, "apart") as own:
            if number == 0:
                assert len(list(islice(DataExecutor(loader, appliance=own), 3))) == 3
                assert next(iter(DataExecutor(loader, appliance=own))) is not None
                begun.set()
                assert told.wait(30)
                return
            for step, _ in enumerate(DataExecutor(loader, appliance=own), 1):
                if step == 4:
                    assert begun.wait(30)
                    wait_until(lambda: is_apart(loader))
            told.set()

    together(2, train)
    lines = [record.message for record in caplog.records if "different epochs at one step" in record.message]
    assert len(lines) == 1
    assert "box 0 left epoch 0 after step 3, and box 1 continues it with step" in lines[0]


def test_boxes_that_call_an_epoch_by_different_numbers_are_named(
    appliance: Appliance, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def train(number: int) -> None:
        loader = DataLoader(streams.uneven, [40, 40])
        with box(appliance, number, 2, 1, "numbers") as own:
            assert len(list(islice(DataExecutor(loader, appliance=own), 3))) == 3
            loader.set_epoch(5 + number)
            for step, _ in enumerate(DataExecutor(loader, appliance=own), 1):
                if step == 4:
                    wait_until(lambda: told.is_set() or is_apart(loader, named=True))
                elif step == 5:
                    told.set()

    together(2, train)
    lines = [record.message for record in caplog.records if "different epochs at one step" in record.message]
    assert len(lines) == 1
    assert re.search(
        r"box (0 is in epoch 5 and box 1 in epoch 6|1 is in epoch 6 and box 0 in epoch 5)\. Call", lines[0]
    )


def test_last_state_outlives_another_box(appliance: Appliance) -> None:
    closed = threading.Event()

    def train(number: int) -> Any:
        loader = DataLoader(streams.shared, 80)
        with box(appliance, number, 2, 2, "closed") as own:
            list(DataExecutor(loader, num_steps=6, appliance=own))
            if number == 0:
                assert closed.wait(30)
                return loader.state_dict()
        closed.set()
        return None

    assert together(2, train)[0]["done"] == [3, 3, 3, 3]
