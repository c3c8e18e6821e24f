"""Rows assigned to steps and boxes by cost: the same rows in each step on any topology, and boxes that cost
the same."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from all_workers import AllWorkers, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Balance, MapLoader, StreamingDataset, StreamingLoader
from penstock.data.ordering import balance as balance_module
from penstock.data.ordering.balance import assign_to_boxes
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")

ROWS = 203
COSTS = np.random.default_rng(3).lognormal(0, 1, ROWS) ** 2
SHAPES: list[Shape] = [(1, 1), (1, 3), (2, 2), (3, 1), (8, 1)]


def loader(over_steps: int | None, **changed: Any) -> MapLoader:
    balance = None if over_steps is None else Balance(COSTS, over_steps)
    given: dict[str, Any] = {
        "global_batch_size": 16,
        "shuffle": True,
        "seed": 1,
        "collate_fn": list,
        "balance": balance,
        **changed,
    }
    return MapLoader(range(ROWS), **given)


def steps_of(over_steps: int | None, count: int, **changed: Any) -> list[list[int]]:
    return [sorted(rows) for rows in AllWorkers(lambda: loader(over_steps, **changed), (1, 1)).take(count)]


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["emit", "pad", "drop", "carry"]),
    st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_steps_have_the_same_rows_on_any_topology(over_steps: int, tail: str, chain_of: Any) -> None:
    """Through resumes in the middle of windows, and over the ends of epochs. Boxes get as many rows as without."""
    skip = [range(20, 36), range(300, 332)]  # the last batch of an epoch has 11 rows, enough for all boxes
    run, got = None, []
    for shape, steps in chain_of:
        run = AllWorkers(lambda: loader(over_steps, tail=tail, skip=skip), shape, run)
        got += [sorted(rows) for rows in run.take(steps)]
    assert got == steps_of(over_steps, len(got), tail=tail, skip=skip)


def test_boxes_get_the_same_rows_after_a_detour() -> None:
    """Over one box for a step, and back."""
    whole = AllWorkers(lambda: loader(3), (4, 1))
    rows = [whole.step_rows() for _ in range(8)]
    first = AllWorkers(lambda: loader(3), (4, 1))
    first.take(2)
    between = AllWorkers(lambda: loader(3), (1, 2), first)
    between.take(1)
    assert [AllWorkers(lambda: loader(3), (4, 1), between).step_rows()] == rows[3:4]


@pytest.mark.parametrize("over_steps", [1, 3])
def test_windows_have_the_rows_of_the_plain_order(over_steps: int) -> None:
    plain, assigned = steps_of(None, 13), steps_of(over_steps, 13)
    for begin in range(0, 12, over_steps):
        window = slice(begin, begin + over_steps)
        assert sorted(chain(*plain[window])) == sorted(chain(*assigned[window]))
    assert plain[12] == assigned[12]


def test_boxes_of_a_step_cost_the_same() -> None:
    """64 rows a box, lengths of a lognormal distribution up to 8 times the median, as where the context ends."""
    costs = np.minimum(np.random.default_rng(0).lognormal(0, 1, 1 << 14), 8.0) ** 2
    made = MapLoader(
        costs, global_batch_size=512, shuffle=True, seed=0, rank=(0, 8), balance=Balance(costs, report=True)
    )
    found = made.imbalance(steps=32)
    assert found.plain > 1.2
    assert found.balanced <= 1.05
    boxes = [
        MapLoader(costs, global_batch_size=512, shuffle=True, seed=0, rank=(box, 8), balance=Balance(costs, 4))
        for box in range(8)
    ]
    for step in zip(*boxes, strict=True):
        sums = [float(batch.sum()) for batch in step]
        assert {len(batch) for batch in step} == {64}
        assert max(sums) <= 1.05 * sum(sums) / 8
    unlike = [step.sum() for step in boxes[0]]
    assert max(unlike) < 1.3 * min(unlike)


def test_largest_row_goes_round() -> None:
    costs = np.array([9.0, 1, 1, 1])
    assigned = [assign_to_boxes(costs, 4, turn) for turn in range(4)]
    assert {next(box for box, rows in enumerate(step) if 0 in rows) for step in assigned} == {0, 1, 2, 3}


@pytest.mark.parametrize("costs", [np.zeros(24), np.full(24, 1e300), np.ones(24, np.int64)])
def test_costs_without_differences(costs: Any) -> None:
    made = MapLoader(range(24), global_batch_size=8, rank=(1, 4), balance=Balance(costs, 3), collate_fn=list)
    assert [len(batch) for batch in made] == [2, 2, 2]
    assert made.imbalance() == pytest.approx(made.imbalance(1)) or made.imbalance().balanced == 1


class Table:
    """Dataset of a library, with columns."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return number

    def column(self, name: str) -> Any:
        assert name == "cost"
        return COSTS


def test_costs_of_every_kind_deal_alike(tmp_path: Path) -> None:
    np.save(tmp_path / "costs.npy", COSTS)
    given: dict[str, Any] = {"global_batch_size": 16, "shuffle": True, "seed": 1, "collate_fn": list}
    mapped = np.load(tmp_path / "costs.npy", mmap_mode="r")
    kinds: list[Any] = [mapped, torch.tensor(COSTS, requires_grad=True), lambda ids: COSTS[ids], "cost"]
    for cost in kinds:
        assert list(MapLoader(Table(), balance=Balance(cost, 2), **given)) == list(loader(2))


def test_streaming_loader_deals_too(dataset: StreamingDataset) -> None:
    costs = np.arange(100) ** 2.0

    def made(balance: Balance) -> StreamingLoader:
        return StreamingLoader(dataset, global_batch_size=20, shuffle=True, seed=4, balance=balance, collate_fn=list)

    over = AllWorkers(lambda: made(Balance(costs, 5)), (1, 2))
    first = over.take(2)
    rest = AllWorkers(lambda: made(Balance(costs, 5)), (4, 1), over)
    boxes = [rest.step_rows() for _ in range(3)]
    sums = [[sum(costs[int(row["number"])] for row in box) for box in step or ()] for step in boxes]
    assert all(max(step) < 1.2 * np.mean(step) for step in sums)
    rows = [*chain(*first), *chain(*chain(*(step or () for step in boxes)))]
    assert sorted(int(row["number"]) for row in rows) == list(range(100))


def test_state_names_costs_that_decide_the_order() -> None:
    """A step has the same rows whatever they cost, unless the rows of several are assigned."""
    state = loader(1).state_dict()
    loader(None).load_state_dict(state)
    state = loader(2).state_dict()
    for other in (loader(None), loader(3), loader(None, balance=Balance(COSTS + 1, 2)), loader(2, global_batch_size=8)):
        with pytest.raises(StateMismatchError, match="balance"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("balance", "words"),
    [
        (Balance(COSTS[1:]), "must have one number for each of 203 samples, got 202"),
        (Balance(np.where(np.arange(ROWS) == 7, math.nan, COSTS)), "got nan for sample 7"),
        (Balance(-COSTS), "must be finite and at least 0, got -"),
        (Balance(np.full(ROWS, math.inf)), "got inf for sample 0"),
        (Balance(lambda ids: ids[1:]), "must return 203 numbers, .* got 202"),
        (Balance("length"), "needs a dataset with columns, got range"),
        (Balance(np.zeros((ROWS, 2))), "a one-dimensional array of numbers"),
        (Balance(COSTS, 0), "over_steps must be at least 1"),
        (Balance(COSTS, 1 << 20), "at most 65536 with global batches of 16"),
        (COSTS, "balance must be a penstock.data.Balance"),
    ],
)
def test_bad_costs_name_the_remedy(balance: Any, words: str) -> None:
    with pytest.raises((InvalidArgumentError, DatasetError), match=words):
        loader(None, balance=balance)


def test_batches_larger_than_a_window_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance_module, "WINDOW_LIMIT", 8)
    assert len(list(loader(1))) == len(list(loader(None)))
    with pytest.raises(InvalidArgumentError, match="over_steps must be at most 1 with global batches of 16"):
        loader(2)


def test_imbalance_needs_costs() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Pass balance=Balance\(cost, report=True\)"):
        loader(None).imbalance()
