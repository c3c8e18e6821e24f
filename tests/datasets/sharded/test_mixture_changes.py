"""Weights that an operator changes in mid-run: the loader's part, without the processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from all_workers import AllWorkers, saved
from given_shards import Given
from tests.datasets.sharded.test_mixture_schedules import mixed

from penstock.data import Counts, Mapped, Mixture, Packed, Ramp, Schedule, ShardLoader
from penstock.data.sharded.mixture_changes import MixtureChange
from penstock.proto.errors import InvalidArgumentError, ReplayMismatchError, StateCorruptError, StateMismatchError

ROWS = 8
STEP = 6
"""Number of the first batch with other weights."""


def source(number: int) -> Given:
    return Given([[[number, shard, at, 0] for at in range(30 + number)] for shard in range(4)])


def loader(weights: Any, by: Any = "samples", more: int = 0, **options: Any) -> ShardLoader:
    mixture = Mixture({"abc"[n]: source(n) for n in range(2 + more)}, weights, by=by)
    usual: dict[str, Any] = {"global_batch_size": ROWS, "block": ROWS, "partitions": 2, "seed": 3, "collate_fn": list}
    return ShardLoader(Mapped(mixture, list), **(usual | options))


def change(step: int, parts: dict[str, int], *added: str, required: bool = False, epoch: int = 0) -> dict[str, Any]:
    functions = {name: f"sources:{name}" for name in added}
    made = MixtureChange(str(step), (step - 1) * ROWS, parts, functions, required, epoch)
    return {**made.plain(), "required": required}


def load(name: str) -> Given:
    return source("abc".index(name.partition(":")[2]))


def ordered(changes: list[dict[str, Any]], **options: Any) -> ShardLoader:
    """A loader of the original code, in a run whose weights were changed."""
    made = loader([2, 1], **options)
    made.change_mixture(changes, load)
    return made


CHANGES = [change(STEP, {"a": 1, "b": 3}), change(13, {"a": 0, "b": 3, "c": 1}, "c")]
LATER = Schedule({0: [2, 1, 0], 40: [1, 3, 0], 96: [0, 3, 1]})


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_changed_run_equals_the_schedule(by: Any) -> None:
    """A run that is saved at the change, and goes on elsewhere with the original code."""
    saved = 5
    whole = AllWorkers(lambda: loader(LATER, by, 1), (1, 1)).take(40)
    before = AllWorkers(lambda: loader([2, 1], by), (1, 3))
    got = before.take(min(saved, STEP - 1))
    first = AllWorkers(lambda: ordered(CHANGES[:1], by=by), (1, 3), before)
    got += first.take(saved - len(got))
    second = AllWorkers(lambda: ordered(CHANGES[:1], by=by), (2, 2), first)
    got += second.take(2)
    third = AllWorkers(lambda: ordered(CHANGES, by=by), (2, 2), second)
    got += third.take(10)
    third.lose(1)
    fourth = AllWorkers(lambda: ordered([], by=by), (1, 1), third)  # only the state has the changes
    assert len(got) < 40
    with pytest.raises(StateMismatchError, match="from `penstock mix --add`"):
        loader([2, 1], by).load_state_dict(third.state())
    got += fourth.take(40 - len(got))
    assert got == whole


def test_state_beyond_a_new_change_is_refused() -> None:
    """Of a worker that made batches ahead and is replaced. test_mixture_windows.py goes on from the states before."""
    old = AllWorkers(lambda: loader([2, 1]), (1, 3))
    _some(old.passes[2], 2)
    new = AllWorkers(lambda: ordered([change(STEP, {"a": 1, "b": 3}, required=True)]), (1, 3))
    with pytest.raises(ReplayMismatchError, match="lacks the weights"):
        new.workers[2].load_state_dict(old.workers[2].state_dict())


def _some(batches: Any, count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


def _rows(batch: Any) -> Any:
    return batch["batch"] if isinstance(batch, dict) else batch


def test_code_may_catch_up_with_the_changes() -> None:
    """The weights of a change may go into the code, also with other weights that come later."""
    run = AllWorkers(lambda: ordered(CHANGES), (1, 2))
    got = run.take(16)
    caught = Schedule({0: [2, 1, 0], 40: [1, 3, 0], 96: [0, 3, 1], 200: Ramp([1, 1, 1], 10)})
    got += AllWorkers(lambda: loader(caught, more=1), (2, 1), run).take(20)
    assert got == AllWorkers(lambda: loader(caught, more=1), (1, 1)).take(36)


def test_epochs_before_a_change_lack_it() -> None:
    """The loop left epoch 0 beyond the position that the change has in epoch 1. A runner that comes from epoch 0 makes
    its batches as they were, counts included, and then those of epoch 1 with the change."""
    asked = [change(STEP, {"a": 1, "b": 3}, required=True, epoch=1)]
    code, planned = loader([2, 1], keys="key"), loader(Schedule({0: [2, 1], 40: [1, 3]}), keys="key")
    epoch = iter(code)
    before = _some(epoch, 9)
    _some(iter(planned), 9)
    beyond, expected = code.state_dict(), _some(iter(planned), 12)
    made = ordered(asked, keys="key", counts=Counts())
    assert [_rows(batch) for batch in _some(iter(made), 9)] == [_rows(batch) for batch in before]
    again = ordered(asked, keys="key")
    again.load_state_dict(saved(beyond))
    assert _rows(next(iter(again))) == _rows(next(epoch))
    for each in (made, again):
        batches = _some(iter(each), 12)
        assert [_rows(batch) for batch in batches] == [_rows(batch) for batch in expected]
        for batch in (*before, *batches):
            assert [each.restore_sample(key) for key in batch["key"]] == batch["batch"]
    assert made.tally is not None
    rows = [row[0] for batch in (*before, *expected) for row in batch["batch"]]
    assert {group[0]: row[0] for group, row in made.tally.rows.items()} == {"a": rows.count(0), "b": rows.count(1)}


def test_state_of_a_later_epoch_keeps_its_changes() -> None:
    """A state lists a change of its epoch, and a runner without the run's record goes on with it elsewhere."""
    made = ordered([change(STEP, {"a": 1, "b": 3}, epoch=1), change(3, {"b": 1}, epoch=2)])
    _some(iter(made), 2)
    epoch = iter(made)
    _some(epoch, 8)
    elsewhere = loader([2, 1])
    elsewhere.load_state_dict(saved(made.state_dict()))
    assert _some(iter(elsewhere), 5) == _some(epoch, 5)
    assert {row[0] for batch in _some(iter(elsewhere), 9)[2:] for row in batch} == {1}


def test_change_of_another_history_is_left_out() -> None:
    """The run's record has a change, but its job goes on from a state of a run that went its own way past it."""
    run = AllWorkers(lambda: loader([2, 1]), (1, 1))
    got = run.take(9)
    got += AllWorkers(lambda: ordered(CHANGES[:1]), (2, 1), run).take(5)
    assert got == AllWorkers(lambda: loader([2, 1]), (1, 1)).take(14)


def test_plan_names_the_position_and_weights() -> None:
    steps = 3
    run = AllWorkers(lambda: loader([2, 1]), (1, 2))
    run.take(steps)
    asked = {"a": "0.25", "b": "0.5", "c": "0.25"}
    state = run.state()
    _, position, parts, was, now, _ = ordered([]).plan_change(STEP - 1 - steps, 0, state, asked, {"c": "sources:c"}, [])
    assert (position, parts) == ((0, 40), {"a": 1, "b": 2, "c": 1})
    assert (was, now) == ({"a": 2 / 3, "b": 1 / 3}, {"a": 0.25, "b": 0.5, "c": 0.25})


def test_plan_of_a_later_epoch_counts_from_it() -> None:
    """The changes that only the state lists are in force there, too."""
    run = AllWorkers(lambda: ordered(CHANGES[:1]), (1, 2))
    run.take(9)
    _, begins, parts, was, _, _ = ordered([]).plan_change(7, 2, run.state(), {}, {}, ["a"])
    assert (begins, parts, was) == ((2, 56), {"a": 0, "b": 1}, {"a": 0.25, "b": 0.75})


def test_added_source_must_pass_the_layers() -> None:
    """A sample of it goes through the layers above the mixture, and into a batch with one of another source."""

    def refuse(sample: Any) -> list[Any]:
        if sample[0] == 2:
            raise ValueError("a sample of c")
        return list(sample)

    def together(samples: list[Any]) -> Any:
        return torch.tensor(samples)

    for stack, collate in ((lambda: Mapped(_mixture(), refuse), list), (_mixture, together)):
        made = ShardLoader(stack(), global_batch_size=ROWS, partitions=2, collate_fn=collate)
        made.change_mixture([], lambda name: Given([[[2, 0]]] * 4) if name == "short" else load(name))
        with pytest.raises(ValueError, match=r"a sample of c|expected sequence of length"):
            made.plan_change(3, 0, None, {"a": "1", "b": "1", "c": "1"}, {"c": "short"}, [])


def _mixture() -> Mixture:
    return Mixture({"a": source(0), "b": source(1)}, [2, 1])


@pytest.mark.parametrize(
    ("weights", "added", "retired", "says"),
    [
        ({"a": "1", "x": "1"}, {}, [], r"a source must be one of a, b, got 'x'"),
        ({"a": "0", "b": "0"}, {}, [], r"at least one weight must be above 0"),
        ({"a": "1e999999999", "b": "1"}, {}, [], r"must be 0 or from 1e-400 to 1e400, got '1e999999999'"),
        ({"a": "1"}, {}, [], r"--retire must name each source, got none for b"),
        ({"a": "1", "b": "1"}, {}, ["b"], r"got 'b' in both"),
        ({}, {"c": "sources:c"}, [], r"must have a weight for the added source 'c'"),
        ({"a": "1", "b": "1"}, {"a": "sources:c"}, [], r"--add must name a new source, got 'a'"),
        ({"a": "1", "b": "1", "c": "1"}, {"c": "sources:few"}, [], r"'c' must have 4 shards, got 1"),
    ],
)
def test_impossible_plans_are_refused(weights: Any, added: Any, retired: Any, says: str) -> None:
    made = loader([2, 1])
    made.change_mixture([], lambda name: Given([[1]]) if name == "sources:few" else load(name))
    with pytest.raises(InvalidArgumentError, match=says):
        made.plan_change(3, 0, None, weights, added, retired)


def test_position_must_be_in_range() -> None:
    with pytest.raises(InvalidArgumentError, match="--from-step must name a step before sample"):
        loader([2, 1]).plan_change(1 << 60, 0, None, {}, {}, ["a"])


@pytest.mark.parametrize(
    ("stack", "got"),
    [
        (lambda: Packed(mixed([1, 1, 1], "tokens"), length=16), "Packed"),
        (lambda: Mapped(mixed([1, 1, 1]), list, skip_failures=2), "Mapped with skip_failures"),
        (lambda: Mapped(Given([range(9)]), list), "Given"),
        (lambda: Mixture([Given([range(9)] * 2)] * 2, [1, 1], stop="last"), "a Mixture with another stop"),
    ],
)
def test_mixture_without_positions_is_refused(stack: Any, got: str) -> None:
    made = ShardLoader(stack(), batch_size=2, collate_fn=list)
    refused = rf"the uppermost source must be a Mixture.*, got {got}$"
    with pytest.raises(InvalidArgumentError, match=refused):
        made.plan_change(3, 0, None, {"a": "1"}, {}, [])
    with pytest.raises(InvalidArgumentError, match=refused):
        made.change_mixture(CHANGES, load)


@pytest.mark.parametrize(
    "damage", [7, [7], [{}], [{**CHANGES[0], "position": -1}], [{**CHANGES[0], "parts": {"a": "x"}}]]
)
def test_damaged_changes_are_refused(damage: Any) -> None:
    made = ordered(CHANGES)
    with pytest.raises(StateCorruptError, match=r"ShardLoader's state is damaged: .*Load an older state") as caught:
        made.load_state_dict({**made.state_dict(), "mixture_changes": damage})
    assert "Error(" not in caught.value.message
