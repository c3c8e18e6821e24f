"""Repeated, Mapped and Filtered; and what all layers refuse."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from given_shards import Given, Placed, again, first, whole

from penstock.data import (
    Chunked,
    Filtered,
    Grouped,
    Mapped,
    Mixture,
    Packed,
    Repeated,
    ShardedSource,
    SkipSample,
    WindowShuffled,
)
from penstock.data.sharded.layers import layer
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError

NUMBERS = [list(range(10)), list(range(100, 103))]


def never(sample: Any) -> bool:
    return False


def drawn(sample: Any, generator: np.random.Generator) -> tuple[Any, float]:
    return sample, generator.random()


# --- repeated


def test_each_shard_begins_its_own_next_epoch() -> None:
    source = Repeated(Placed([3, 1]))
    assert [sample[:3] for sample in first(source, 7)] == [*((e, 0, i) for e in range(2) for i in range(3)), (2, 0, 0)]
    assert [sample[:3] for sample in first(source, 3, shard=1)] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]


def test_sample_positions_continue_across_epochs() -> None:
    source = Repeated(Placed([3, 3]))
    assert [sample[3] for sample in first(source, 7, shard=1)] == [1, 3, 5, 7, 9, 11, 13]
    cursor = source.open(0, 0, 1, None, lambda index: 100 + index)
    next(cursor)
    cursor.skip(3)
    assert next(cursor)[3] == 104
    cursor = source.open(0, 0, 1, cursor.saved_position(), lambda index: 100 + index)
    assert next(cursor)[3] == 105


def test_shard_without_samples_is_named() -> None:
    source = Repeated(Given([[1], []], known=False))
    with pytest.raises(DatasetError, match=r"shard 1 of 2 is empty in epoch 0.*fewer shards"):
        next(source.open(1, 0, 1))


def test_later_empty_epoch_is_an_error() -> None:
    source = Repeated(Filtered(Placed([4]), lambda sample: sample[0] == 0))
    cursor = source.open(0, 0, 1)
    assert len(list(itertools.islice(cursor, 4))) == 4
    cursor = again(source, cursor)
    with pytest.raises(DatasetError, match=r"shard 0 of 1 is empty in epoch 1"):
        next(cursor)


def test_what_never_ends_is_not_repeated() -> None:
    with pytest.raises(InvalidArgumentError, match="endless already"):
        Repeated(Repeated(Given(NUMBERS)))


# --- mapped


def test_generator_depends_on_the_sample_alone() -> None:
    source = Mapped(Given([[5] * 4, [5] * 4]), drawn, random=True)
    places = itertools.product((0, 1), (0, 1), (1, 2))
    seen = [sample for e, s, seed in places for sample in whole(source, epoch=e, shard=s, seed=seed)]
    assert len(set(seen)) == len(seen)
    cursor = source.open(1, 1, 2)
    cursor.skip(2)
    assert [next(cursor), next(cursor)] == seen[-2:]


def test_kept_generator_is_not_disturbed() -> None:
    kept: list[np.random.Generator] = []
    source = Mapped(Given(NUMBERS), lambda _, generator: kept.append(generator), random=True)
    whole(source)
    values = [generator.random() for generator in kept]
    kept.clear()
    cursor = source.open(0, 0, 1)
    for value in values:
        next(cursor)
        assert kept[-1].random() == value


def test_stacked_random_layers_draw_differently() -> None:
    inner = Mapped(Given([[0] * 5]), drawn, random=True)
    values = whole(Mapped(inner, drawn, random=True))
    assert all(below != above for (_, below), above in values)


def test_what_a_function_raises_says_where() -> None:
    def refuses(number: int) -> int:
        if number == 102:
            raise KeyError("no 102")
        return number

    cursor = Mapped(Given(NUMBERS), refuses).open(1, 3, 1)
    cursor.skip(2)
    with pytest.raises(KeyError, match="no 102") as caught:
        next(cursor)
    assert caught.value.__notes__ == [f"Mapped {refuses.__qualname__}: shard 1, epoch 3, sample 2"]


def fails_at(bad: set[int], how: type[Exception] = ValueError) -> Callable[[int], int]:
    def function(number: int) -> int:
        if number in bad:
            raise how(f"bad {number}")
        return number

    return function


def test_failures_are_left_out_with_a_warning() -> None:
    source = Mapped(Given(NUMBERS), fails_at({1, 2, 5}), skip_failures=2, name="f")
    with pytest.warns(
        UserWarning, match=r"Mapped f: shard 0, epoch 0, sample \d is left out: ValueError: bad"
    ) as caught:
        assert whole(source) == [0, 3, 4, 6, 7, 8, 9]
    assert len(caught) == 3
    assert source.lengths(0) is None


def test_too_many_failures_in_a_row_are_an_error() -> None:
    cursor = Mapped(Given(NUMBERS), fails_at({3, 4, 5}), skip_failures=2, name="f").open(0, 0, 1)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(ValueError, match="bad 5") as caught:
        list(cursor)
    assert caught.value.__notes__ == ["Mapped f: shard 0, epoch 0, sample 5"]


def test_to_skip_a_sample_is_no_failure() -> None:
    source = Mapped(Given(NUMBERS), fails_at({1, 2, 3, 4, 5}, SkipSample), skip_failures=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(source) == [0, 6, 7, 8, 9]
        cursor = source.open(0, 0, 1)
        assert cursor.skip(2) == 2
        assert next(again(source, cursor)) == 7


def test_skip_sample_ends_a_row_of_failures() -> None:
    def function(number: int) -> int:
        if number == 1:
            raise SkipSample
        if number < 3:
            raise ValueError(number)
        return number

    with pytest.warns(UserWarning, match="sample [02] is left out"):
        assert first(Mapped(Given(NUMBERS), function, skip_failures=1), 2) == [3, 4]


def test_skip_sample_needs_skip_failures() -> None:
    cursor = Mapped(Given(NUMBERS), fails_at({0}, SkipSample)).open(0, 0, 1)
    with pytest.raises(InvalidArgumentError, match="skip_failures to 1 or more, or use Filtered"):
        next(cursor)


# --- filtered


@pytest.mark.parametrize(
    "over",
    [
        lambda source: Filtered(source, never),
        lambda source: Mapped(source, fails_at(set(range(10)), SkipSample), skip_failures=1),
        lambda source: Chunked(Mapped(source, lambda _: []), length=4),
        lambda source: Packed(Mapped(source, lambda _: []), length=4),
        lambda source: Grouped(source, lambda number: number, 2, window=10, drop_rest=True),
    ],
    ids=["Filtered", "Mapped", "Chunked", "Packed", "Grouped"],
)
def test_nothing_is_searched_for_ever(
    over: Callable[[ShardedSource], ShardedSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "SEARCHED_SAMPLES", 50)
    with pytest.raises(
        DatasetError, match=r"at least one of 50 consecutive samples of shard 0.*put the Repeated above it"
    ):
        next(over(Repeated(Given(NUMBERS))).open(0, 0, 1))
    assert whole(over(Given(NUMBERS))) == []
    with pytest.raises(DatasetError, match=r"shard 0 of 2 is empty in epoch 0"):
        next(Repeated(over(Given(NUMBERS))).open(0, 0, 1))


# --- all layers

LAYERS: dict[str, Callable[[Any], ShardedSource]] = {
    "Repeated": Repeated,
    "Mapped": lambda source: Mapped(source, str),
    "Mapped, skipping": lambda source: Mapped(source, str, skip_failures=1),
    "Filtered": lambda source: Filtered(source, bool),
    "Chunked": lambda source: Chunked(source, length=4),
    "Packed": lambda source: Packed(source, length=4),
    "WindowShuffled": lambda source: WindowShuffled(source, 4),
    "Mixture": lambda source: Mixture([source], [1], stop="last"),
}


@pytest.mark.parametrize("over", LAYERS)
def test_damaged_position_is_refused(over: str) -> None:
    source = LAYERS[over](Given(NUMBERS))
    good = source.open(0, 0, 1).saved_position()
    source.open(0, 0, 1, good)
    wrong = [{name: value for name, value in good.items() if name != "index"} if "index" in good else {}, [], "x", 3]
    wrong += [
        {**good, name: bad}
        for name, value in good.items()
        if type(value) is int
        for bad in (-1, 0.0, True, None, 1 << 70)
    ]
    for token in wrong:
        with pytest.raises(StateCorruptError, match=f"the saved position of (a )?{over.split(',')[0]}.* must be"):
            source.open(0, 0, 1, token)


@pytest.mark.parametrize("over", LAYERS)
def test_sources_are_checked_and_described(over: str) -> None:
    name = over.split(",")[0]
    with pytest.raises(InvalidArgumentError, match=rf"{name} needs a source.*got list.*LogicalShards"):
        LAYERS[over]([1, 2, 3])
    described = LAYERS[over](Given(NUMBERS)).described()
    assert json.loads(json.dumps(described)) == described
    assert described["kind"] == name
    assert (described.get("source") or described["sources"][0]) == Given(NUMBERS).described()
