"""Plans of the way to a position, as decisions over values: any history, any position, no process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_histories import History, histories

from penstock.worker.loader.restart_plan import (
    NEAR,
    first_fit,
    plan_recovery,
    worth_restoring,
)
from penstock.worker.loader.restart_points import UNFIT, Launch, RestartPoint, StreamPosition
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot


def start_of(way: RestartPoint) -> tuple[int, int]:
    return way.epoch, way.total


# ---- a runner that takes a slot over


@settings(max_examples=30)
@given(histories())
def test_every_way_reaches_just_the_target(history: History) -> None:
    target = history.target
    plan = plan_recovery(history.points, target)
    for way in plan:
        abandoned = target.with_abandoned(way.history.abandoned)
        assert history.walk(*start_of(way), abandoned) == (target.epoch, target.total)

    # A Hello names the epochs that this launch's loop left; those of former launches come with the point.
    for point in filter(history.is_on_the_way, history.points):
        heard = replace(target, abandoned={epoch: at for epoch, at in target.abandoned.items() if epoch >= point.epoch})
        for start in ((0, 0), (point.epoch, point.total)):
            assert history.walk(*start, heard.with_abandoned(point.history.abandoned)) == (target.epoch, target.total)


@settings(max_examples=30)
@given(histories())
def test_the_nearest_point_comes_first(history: History) -> None:
    target = history.target
    fit = [point for point in history.points if history.is_on_the_way(point)]
    just_left = [
        point for point in fit if not point.is_epoch_start and point.total == target.abandoned.get(point.epoch)
    ]
    fit = [point for point in fit if point not in just_left] or fit
    fit = [point for point in fit if point.total < target.total] or fit
    plan = plan_recovery(history.points, target)
    order = [start_of(point) for point in plan]
    assert order == sorted(map(start_of, fit), reverse=True)
    plain = [replace(point, skips=(), history=point.history.of(Launch())) for point in history.points]
    assert order == [*map(start_of, plan_recovery(plain, target))], "launches do not matter"


@settings(max_examples=25)
@given(histories(), st.sampled_from(UNFIT))
def test_a_way_astray_gives_way_to_the_next(history: History, kind: type[Exception]) -> None:
    plan = plan_recovery(history.points, history.target)
    if not plan:
        return
    wrong = [id(history.points[number]) for number in history.astray if number < len(history.points)]
    tried: list[RestartPoint] = []
    told: list[Exception] = []

    def take(way: RestartPoint) -> None:
        tried.append(way)
        if id(way) in wrong:
            raise kind(f"not from {start_of(way)}")

    right = [way for way in plan if id(way) not in wrong]
    if right:
        assert first_fit(plan, take, UNFIT, told.append) is right[0]
    else:
        with pytest.raises(kind, match=r"not from"):
            first_fit(plan, take, UNFIT, told.append)
    assert [*map(id, tried)] == [*map(id, plan[: len(tried)])]
    assert len(told) == len(tried) - 1


@settings(max_examples=30)
@given(histories())
def test_the_daemon_picks_what_a_runner_would(history: History) -> None:
    """It need not lie before the last batch, because nothing is compared."""
    target, store = history.target, SlotSnapshots()
    last = {
        (point.epoch, point.total, point.is_epoch_start, point.began): number
        for number, point in enumerate(history.points)
    }
    for number in last.values():
        point = history.points[number]
        place = point.position
        store.add(StoredSnapshot(place.epoch, place.delivered, place.total, 0, point.is_epoch_start, 0, b""), -1)
    points = [history.points[number] for number in last.values()]
    fit = [point for point in points if history.is_on_the_way(point)]
    first = [point for point in fit if point.is_epoch_start or point.total != target.abandoned.get(point.epoch)] or fit
    expected = max(((point.epoch, point.total, point.is_epoch_start) for point in first), default=None)
    nearest = store.nearest(target.epoch, target.total, abandoned=target.abandoned)
    assert expected == (None if nearest is None else (nearest.epoch, nearest.total, nearest.epoch_start))


# ---- snapshots of a pure loader


def point_at(total: int, spent_s: float, began: int = 0) -> RestartPoint:
    before = b"" if total == began else None
    return RestartPoint(StreamPosition(1, total - began, total, 0), None, b"", before, spent_s=spent_s)


@given(
    st.lists(st.floats(0, 1), max_size=200),
    st.sets(st.integers(0, 200)),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 2.0, float("inf")]),
)
def test_a_snapshot_is_worth_its_comparison(costs: list[float], taken: set[int], known: bool, replay_s: float) -> None:
    """Batch n takes costs[n - 1] seconds; there are snapshots after the batches `taken`."""
    total = len(costs)
    spent = [sum(costs[:count]) for count in range(total + 1)]
    points = [point_at(count, spent[count]) for count in sorted(taken) if count <= total]
    chosen = worth_restoring(points, total, spent[total] if known else None, replay_s)
    if known and spent[total] < replay_s:
        assert chosen is None, "the epoch is made again more quickly than it is worth"
    if chosen is None:
        far = [point for point in points if 0 < point.total <= total - NEAR]
        assert not known or spent[total] < replay_s or not far
        return
    assert not chosen.is_epoch_start
    assert chosen.total < total, "one batch at least is compared"
    assert total - chosen.total >= NEAR or spent[total] - chosen.spent_s >= replay_s
    nearer = [point for point in points if chosen.total < point.total < total]
    assert all(total - point.total < NEAR for point in nearer), "no nearer one lies far enough"
