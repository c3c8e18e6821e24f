"""Plans of the way to a position, as decisions over values: any history, any position, no process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_histories import History, histories

from penstock.proto.errors import InputFnError, ReplayMismatchError
from penstock.worker.loader.restart_plan import (
    NEAR,
    first_fit,
    plan_recovery,
    route,
    worth_restoring,
)
from penstock.worker.loader.restart_points import UNFIT, Launch, RestartPoint, StreamPosition
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot


def start_of(way: RestartPoint) -> tuple[int, int]:
    return way.epoch, way.total


# ---- a runner that takes a slot over


@settings(max_examples=60)
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


@settings(max_examples=60)
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


@settings(max_examples=40)
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


def test_another_error_ends_the_search_at_once() -> None:
    tried: list[int] = []

    def take(way: int) -> None:
        tried.append(way)
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        first_fit([1, 2], take, UNFIT, lambda error: None)
    assert tried == [1]
    assert (ReplayMismatchError, InputFnError) == UNFIT


@settings(max_examples=60)
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


@pytest.mark.parametrize(
    ("total", "spent_s", "chosen"),
    [
        (100, 1.9, None),  # the whole epoch took less
        (100, 50.0, 96),  # 4 batches of 0.5 s lie behind it
        (100, 2.5, 36),  # 64 batches, which took less than 2 s
        (81, 40.5, 76),  # 80 lies one batch before, which took 0.5 s
        (65, 65 * 0.02, None),
        (400, None, None),  # nobody has seen how long the epoch took, and its snapshots say 0 s
    ],
)
def test_which_snapshot_is_restored(total: int, spent_s: float | None, chosen: int | None) -> None:
    each = 0.0 if spent_s is None else spent_s / total
    points = [point_at(count, each * count) for count in range(0, total, 4)]
    found = worth_restoring(points, total, spent_s, 2.0)
    assert (None if found is None else found.total) == chosen


def test_slow_batches_are_not_repeated_without_need() -> None:
    """With unequal batches, the time since the snapshot decides, and not its number of batches."""
    points = [point_at(10, 10.0), point_at(90, 10.5), point_at(99, 14.0)]
    near = worth_restoring(points, 100, 14.5, 2.0)
    assert near is points[1], "10 batches, which took 4 s"
    assert worth_restoring(points, 100, 11.9, 2.0) is points[0], "90 batches, which took less"
    assert worth_restoring(points, 100, 14.5, float("inf")) is None


@settings(max_examples=30)
@given(histories())
def test_a_route_ends_at_its_target(history: History) -> None:
    target = history.target
    for epoch in range(target.epoch + 1):
        *before, last = route(epoch, target)
        assert (last.epoch, last.total, last.abandons, last.digest) == (target.epoch, target.total, False, 7)
        assert [leg.epoch for leg in before] == sorted(e for e in target.abandoned if e >= epoch)
        assert all(leg.abandons and not leg.digest and leg.total <= target.total for leg in before)
