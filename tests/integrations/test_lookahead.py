"""A state is that of the batch that the loop has got, however many batches something in between has taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from appliances import made
from cluster import TOKEN
from reading_ahead import PASS, STEPS, WHOLE, ahead_by, following, place_of, places

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import InvalidArgumentError, StateUnavailableError


def by_accelerate(ahead: Lookahead) -> Iterable[Any]:
    from accelerate.data_loader import prepare_data_loader  # not by all that collect this module

    prepared: Iterable[Any] = prepare_data_loader(
        torch.utils.data.DataLoader(ahead, batch_size=None), num_processes=1, process_index=0, dispatch_batches=False
    )
    return prepared


def five_ahead(ahead: Lookahead) -> Iterable[Any]:
    return ahead_by(5, ahead)


WRAPPERS: dict[str, tuple[Callable[[Lookahead], Iterable[Any]], int]] = {
    "accelerate": (by_accelerate, 1),
    "five ahead": (five_ahead, 5),
}
"""Name -> what a framework makes of the loader for an epoch, and how far that is ahead."""


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as found:
        yield found


@pytest.fixture(scope="module")
def plain(appliance: Appliance) -> dict[int, Any]:
    return places(appliance)


@pytest.mark.parametrize("name", WRAPPERS)
def test_exact_at_every_step_with_a_loader_ahead(appliance: Appliance, plain: dict[int, Any], name: str) -> None:
    wrap, depth = WRAPPERS[name]
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, depth=max(depth, 1), appliance=appliance)
    numbers: list[int] = []
    states: dict[int, Any] = {}
    while ahead.step < STEPS:
        for batch in ahead.handed_out(wrap(ahead)):
            numbers.append(int(batch["number"]))
            assert ahead.step == len(numbers)
            left = PASS - (len(numbers) - 1) % PASS - 1
            assert loader.step == ahead.step + min(depth, left), "the naive state would be this far ahead"
            states[ahead.step] = ahead.state_dict()
            if ahead.step == STEPS:
                break
    assert numbers == WHOLE[:STEPS]
    assert {step: place_of(state) for step, state in states.items()} == plain
    resumed = (1, PASS - 1, PASS, PASS + 1) if name == "accelerate" else ()  # one is enough: all have the same states
    for step in resumed:  # the first, those about the end of an epoch, and the first of the next
        assert following(states[step], 2, appliance) == WHOLE[step : step + 2]
    loader.close()


def test_before_the_first_batch_and_after_a_load(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    assert place_of(ahead.state_dict()) == (0, [])
    batches = by_accelerate(ahead)
    for _ in islice(ahead.handed_out(batches), 4):
        state = ahead.state_dict()
    ahead.load_state_dict(state)  # with the epoch under way
    assert (ahead.step, place_of(ahead.state_dict())) == (4, place_of(state))
    through = iter(batches)
    next(through)  # it has taken two, and the loop has not been handed one
    assert loader.step == 6
    assert ahead.step == 4
    ahead.took()
    assert place_of(ahead.state_dict())[0] == 5
    loader.close()


def test_first_queries_use_the_given_appliance(appliance: Appliance) -> None:
    """Frameworks ask for the length before they iterate, and go by it."""
    elsewhere: dict[str, Any] = {"token": TOKEN, "job": "never begun", "box": 1, "num_boxes": 2}
    other = made("127.0.0.1:1", num_workers_per_box=3, **elsewhere)
    ahead = Lookahead(DataLoader(streams.counter, PASS // 2), appliance=other)
    assert len(ahead) == 3 * (PASS // 2)
    assert ahead.box_and_num_boxes == (1, 2)


def test_taken_and_dropped_batch_is_not_counted(appliance: Appliance) -> None:
    loader = DataLoader(streams.shuffled, PASS * 8, noise=False)  # each of two workers has all, and shuffles anew
    ahead = Lookahead(loader, appliance=appliance)
    for _ in ahead.handed_out(ahead_by(1, ahead)):
        if ahead.step == 2:
            break
    assert (ahead.step, loader.step) == (2, 3)
    batches = ahead.handed_out(ahead_by(1, ahead))  # the next epoch; the third batch of the first is gone
    next(batches)
    assert (ahead.step, loader.step) == (4, 5)
    batches.close()  # type: ignore[attr-defined]
    loader.close()


def test_a_loop_that_nobody_counts_is_an_error(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    batches = iter(ahead)
    next(batches)
    next(batches)
    with pytest.raises(RuntimeError, match=r"batches ahead of the loop, got 2: .*call took\(\)"):
        ahead.state_dict()
    loader.close()


def test_repeating_or_sharing_wrappers_are_errors(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    with pytest.raises(RuntimeError, match="taken no further batch"):
        ahead.took()
    twice = (again for batch in ahead for again in (batch, batch))
    with pytest.raises(RuntimeError, match="step 1, but the framework has taken no further batch"):
        list(ahead.handed_out(twice))
    ahead.load_state_dict(ahead.state_dict())
    with pytest.raises(RuntimeError, match="shares, joins or drops"):
        list(ahead.handed_out(islice(ahead, 0, None, 2)))
    loader.close()


def test_mistakes_are_named(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    batches = ahead.handed_out(ahead)
    next(batches)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(ahead)
    with pytest.raises(TypeError, match=r"must be an integer, got 1\.0"):
        loader.state_at(1.0)  # type: ignore[arg-type]
    ahead.load_state_dict(ahead.state_dict())
    with pytest.raises(RuntimeError, match="load_state_dict was called in a loop over"):
        next(batches)
    loader.close()


def test_torch_loader_workers_are_an_error(appliance: Appliance) -> None:
    ahead = Lookahead(DataLoader(streams.counter, PASS // 2), appliance=appliance)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        list(torch.utils.data.DataLoader(ahead, batch_size=None, num_workers=1))


def test_steps_whose_state_cannot_be_had(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    for _ in islice(ahead, 3):
        ahead.took()
    state = loader.state_at(2)
    for step in (-1, 4):
        with pytest.raises(StateUnavailableError, match=f"step must be from 0 to 3, got {step}"):
            loader.state_at(step)
    loader.load_state_dict(state)
    with pytest.raises(StateUnavailableError, match="from 2 to 2"):
        loader.state_at(1)
    assert place_of(loader.state_at(2)) == place_of(state)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="depth"):
        Lookahead(DataLoader(streams.counter), depth=0)
    with pytest.raises(TypeError, match=r"got a builtins\.list"):
        Lookahead([])  # type: ignore[arg-type]


def test_it_goes_into_a_checkpoint(appliance: Appliance, tmp_path: Path) -> None:
    loader = DataLoader(streams.counter, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for _ in ahead.handed_out(by_accelerate(ahead)):
            if ahead.step == 3:
                checkpointer.save(3, {"loader": ahead})
                break
        checkpointer.wait()
        other = DataLoader(streams.counter, PASS // 2)
        for restored in (Lookahead(other, appliance=appliance), other):
            assert checkpointer.restore({"loader": restored}) == 3
            assert place_of(restored.state_dict())[0] == 3
    loader.close()
