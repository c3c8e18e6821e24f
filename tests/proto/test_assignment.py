"""Record of a runner having asked for its assignment, and of the fields that it has read: each runner has its own, also
if one fork server forked them all."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.proto.errors import InputFnError
from penstock.proto.state.assignment import (
    NEUTRAL,
    Assignment,
    WorkerInfoAnswer,
    assigned,
    current_assignment,
    get_streaming_batch_size,
    looked_at,
    process_assignment,
    reads,
    set_assignment,
)


def test_later_sibling_keeps_the_read_mark() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        set_assignment(NEUTRAL)
        current_assignment()
        sibling = os.fork()
        if sibling == 0:
            set_assignment(NEUTRAL)
            os._exit(0)
        os.waitpid(sibling, 0)
        os.write(write, b"1" if looked_at() else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"1"
    os.close(read)
    os.close(write)


def test_a_process_that_the_loader_forked_counts() -> None:
    with assigned(NEUTRAL):
        assert not looked_at()
        child = os.fork()
        if child == 0:
            current_assignment()
            os._exit(0)
        os.waitpid(child, 0)
        assert looked_at()


HERE = Assignment(box=1, num_boxes=2, slot=1, num_workers_per_box=3, seed=5, first_step=9)


def test_what_divides_nothing_is_no_read() -> None:
    with assigned(HERE):
        here = current_assignment()
        assert (here.seed, here.first_step) == (5, 9)
        assert here == HERE != NEUTRAL
        uses: list[Callable[[Assignment], object]] = [repr, hash, copy.deepcopy, pickle.dumps]
        for use in uses:
            use(here)
        assert process_assignment().global_worker_id == 4
        get_streaming_batch_size(64)
        assert not reads().fields


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda here: pickle.loads(pickle.dumps(here))])
def test_copies_are_watched_too(way: Callable[[Assignment], Assignment]) -> None:
    with assigned(HERE):
        copied = way(current_assignment())
        assert copied == HERE == copied
        assert (copied.global_worker_id, copied.total_num_workers) == (4, 6)
        assert reads().fields == {"global_worker_id", "total_num_workers"}


@pytest.mark.parametrize("use", [dataclasses.asdict, dataclasses.astuple, vars])
def test_all_fields_at_once_are_read(use: Callable[[Any], object]) -> None:
    with assigned(HERE):
        assert list(use(current_assignment())) == list(use(HERE))  # type: ignore[call-overload]
        assert reads().next_answer is WorkerInfoAnswer.NONE


def test_replaced_assignment_has_the_other_fields() -> None:
    with assigned(HERE):
        assert dataclasses.replace(current_assignment(), slot=2) == dataclasses.replace(HERE, slot=2)


def test_reads_outlive_a_new_assignment_in_the_same_process() -> None:
    """The user's modules, which may have read it, are imported once."""
    with assigned(HERE):
        assert current_assignment().slot == 1
        set_assignment(dataclasses.replace(HERE, slot=0))
        assert reads().next_answer is WorkerInfoAnswer.NONE


def test_error_of_a_library_names_the_users_line() -> None:
    with assigned(HERE):
        reads().ask(sys._getframe())
        with pytest.raises(
            InputFnError, match=rf"^{re.escape(__file__)}:\d+ reads .\w+ of current_assignment\(\) after"
        ):
            dataclasses.asdict(current_assignment())
