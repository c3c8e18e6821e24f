"""Plans of the way to a position, as decisions over values: any history, any position, no process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_histories import History, histories

from penstock.proto.errors import InputFnError, ReplayMismatchError
from penstock.worker.loader.crossing_kinds import (
    FRESH,
    KEPT,
    REPLAY,
    WAYS,
    EpochBeginning,
    first_choice,
    lead_to_same_epoch,
    right_crossing,
    to_try,
)
from penstock.worker.loader.restart_plan import BEGINNING, Target, first_fit, plan_recovery, route
from penstock.worker.loader.restart_points import UNFIT, Launch, RestartPoint
from penstock.worker.loader.resume_plan import ResumeKind, ResumeWay, resume_ways, rotations
from penstock.worker.runner.local_restart_points import CHECKED_BATCHES, EncodedPoint, LocalRestartPoints
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot


def start_of(way: RestartPoint | None) -> tuple[int, int]:
    return (0, 0) if way is None else (way.epoch, way.total)


# ---- a runner that takes a slot over


@given(histories(), st.booleans())
def test_every_way_reaches_just_the_target(history: History, counted: bool) -> None:
    target = history.target
    plan = plan_recovery(history.points, target, counted=counted)
    for way in plan.ways if plan is not None else []:
        known = plan.nearest.history if way is BEGINNING else way.history  # type: ignore[union-attr]
        assert history.walk(*start_of(way), target.with_abandoned(known.abandoned)) == (target.epoch, target.total)

    # A Hello names the epochs that this launch's loop left; those of former launches come with the point.
    for point in filter(history.is_on_the_way, history.points):
        heard = replace(target, abandoned={epoch: at for epoch, at in target.abandoned.items() if epoch >= point.epoch})
        for start in ((0, 0), (point.epoch, point.total)):
            assert history.walk(*start, heard.with_abandoned(point.history.abandoned)) == (target.epoch, target.total)


@given(histories())
def test_the_nearest_point_comes_first(history: History) -> None:
    target = history.target
    fit = [point for point in history.points if history.is_on_the_way(point)]
    just_left = [
        point for point in fit if not point.is_epoch_start and point.total == target.abandoned.get(point.epoch)
    ]
    fit = [point for point in fit if point not in just_left] or fit
    fit = [point for point in fit if point.total < target.total] or fit
    plan = plan_recovery(history.points, target, counted=False)
    if not fit:
        assert plan is None
        return
    assert plan is not None
    order = [(point.epoch, point.total) for point in plan.ways if point is not None]
    assert order == sorted(((point.epoch, point.total) for point in fit), reverse=True)
    assert plan.ways.count(BEGINNING) <= 1
    assert BEGINNING not in plan.ways[:-1]
    if plan.nearest.history.complete:
        assert start_of(plan.ways[-1]) == (0, 0), "the beginning is tried at last"
        misleading = plan_recovery(history.points, target, counted=True)
        assert misleading is not None
        assert misleading.ways == [BEGINNING]
    else:
        assert BEGINNING not in plan.ways
    plain = [replace(point, skips=(), history=point.history.of(Launch())) for point in history.points]
    other = plan_recovery(plain, target, counted=False)
    assert other is not None
    assert [start_of(way) for way in plan.ways] == [start_of(way) for way in other.ways], "launches do not matter"


@given(histories(), st.sampled_from(UNFIT))
def test_a_way_astray_gives_way_to_the_next(history: History, kind: type[Exception]) -> None:
    plan = plan_recovery(history.points, history.target, counted=False)
    if plan is None:
        return
    wrong = [id(history.points[number]) for number in history.astray if number < len(history.points)]
    tried: list[RestartPoint | None] = []
    told: list[RestartPoint | None] = []

    def take(way: RestartPoint | None) -> None:
        tried.append(way)
        if id(way) in wrong:
            raise kind(f"not from {start_of(way)}")

    right = [way for way in plan.ways if id(way) not in wrong]
    if right:
        assert first_fit(plan.ways, take, UNFIT, lambda error, way: told.append(way)) is right[0]
    else:
        with pytest.raises(kind, match=r"not from"):
            first_fit(plan.ways, take, UNFIT, lambda error, way: told.append(way))
    assert [*map(id, tried)] == [*map(id, plan.ways[: len(tried)])]
    assert [*map(id, told)] == [*map(id, tried[1:])]


def test_another_error_ends_the_search_at_once() -> None:
    tried: list[int] = []

    def take(way: int) -> None:
        tried.append(way)
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        first_fit([1, 2], take, UNFIT, lambda error, way: None)
    assert tried == [1]
    assert (ReplayMismatchError, InputFnError) == UNFIT


@given(histories())
def test_the_daemon_picks_what_a_runner_would(history: History) -> None:
    """Choose among the verified ones; it need not lie before the last batch, because nothing is compared."""
    target, store = history.target, SlotSnapshots()
    last = {
        (point.epoch, point.total, point.is_epoch_start, point.began): number
        for number, point in enumerate(history.points)
    }
    for number in last.values():
        point, verified = history.points[number], number not in history.astray
        place = point.position
        store.add(
            StoredSnapshot(
                place.epoch, place.delivered, place.total, 0, point.is_epoch_start, 0, b"", verified=verified
            ),
            -1,
        )
    points = [history.points[number] for number in last.values() if number not in history.astray]
    fit = [point for point in points if history.is_on_the_way(point)]
    first = [point for point in fit if point.is_epoch_start or point.total != target.abandoned.get(point.epoch)] or fit
    expected = max(((point.epoch, point.total, point.is_epoch_start) for point in first), default=None)
    nearest = store.nearest(target.epoch, target.total, abandoned=target.abandoned)
    assert expected == (None if nearest is None else (nearest.epoch, nearest.total, nearest.epoch_start))


# ---- back to where the loop left an epoch


def own_bases(history: History) -> LocalRestartPoints:
    own = LocalRestartPoints()
    for point in sorted(history.points, key=lambda point: (point.epoch, point.total)):
        own.add(EncodedPoint(point.epoch, point.total, b""), epoch_start=point.is_epoch_start)
    return own


@given(histories(), st.booleans(), st.booleans(), st.integers(0, 1))
def test_every_way_back_reaches_the_place(history: History, exact: bool, doubted: bool, following: int) -> None:
    target = history.target
    points = [point for point in history.points if point.began == history.began(point.epoch)]
    plan = own_bases(replace(history, points=points)).plan_return(target, exact=exact, following=following)
    ways = plan.ways(epoch_start_failed=doubted)
    for way in ways:
        just_left = way.total == target.abandoned.get(way.epoch) and way.total > 0
        assert not just_left, "one of just there may not know where it is"
        assert history.walk(way.epoch, way.total, target) == (target.epoch, target.total)
    inside = [
        point.total
        for point in points
        if not point.is_epoch_start
        and point.epoch == target.epoch
        and target.total - point.total >= (1 if exact else CHECKED_BATCHES)
    ]
    if inside:
        assert (ways[0].epoch, ways[0].total) == (target.epoch, max(inside))
    if plan.probe is not None:
        assert plan.epoch_start is not None
        assert not inside
        assert plan.epoch_start.total == target.total == plan.probe.total - 1
        assert plan.probe.digest == following == 1
    if any(point.epoch == target.epoch and point.is_epoch_start for point in points):
        assert plan.epoch_start is not None
        assert doubted or ways[0] in (plan.inside, plan.epoch_start)


def test_doubt_prefers_what_lies_before_the_epoch() -> None:
    own = LocalRestartPoints()
    own.add(EncodedPoint(0, 0, b"start"), epoch_start=True)
    own.add(EncodedPoint(0, 5, b"inside"), epoch_start=False)
    own.add(EncodedPoint(1, 8, b"epoch_start"), epoch_start=True)
    plan = own.plan_return(Target(1, 8), exact=False, following=3)
    assert plan.probe == Target(1, 9, digest=3)
    assert [way.data for way in plan.ways(epoch_start_failed=False)] == [b"epoch_start", b"inside"]
    assert [way.data for way in plan.ways(epoch_start_failed=True)] == [b"inside", b"epoch_start", b"inside"]
    assert own.plan_return(Target(1, 8), exact=False).probe is None


# ---- a resume on the topology that the state was saved on


@given(st.sampled_from([0, 2, 4]), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2), st.data())
def test_a_resume_has_a_way(
    methods: int, own: bool, whole: bool, replays: bool, total: int, data: st.DataObject
) -> None:
    turns = None
    if own and methods == 4:
        turns = rotations(*(data.draw(st.integers(0, 2)) for _ in range(3)), whole=whole)
    ways = resume_ways(methods=methods, turns=turns, whole=whole, replays=replays, total=total)
    kinds = [way.kind for way in ways]
    assert kinds
    assert ResumeKind.BEGINNING not in kinds[:-1]
    assert whole or ResumeKind.BEGINNING not in kinds
    assert (methods == 4) or kinds[0] is ResumeKind.RESTART_POINT
    if turns is None:
        assert kinds[0] is not ResumeKind.BEGINNING
        assert (kinds[-1] is ResumeKind.BEGINNING) == (whole and (methods == 4 or total > 0))
    elif whole and replays:
        assert kinds == [ResumeKind.BEGINNING]


def test_batches_tell_who_is_worker_0() -> None:
    undoubted, as_was, turned = (ResumeWay(ResumeKind.OWN_METHODS, *rest) for rest in ((0,), (0, True), (2, True)))
    assert rotations(0, 0, 0, whole=True) == [undoubted]
    assert rotations(2, 7, 8, whole=True) == [as_was, turned]
    assert rotations(2, 7, 7, whole=True) == rotations(2, 0, 8, whole=True) == []
    assert rotations(2, 7, 7, whole=False) == [as_was, turned], "there is no other word than theirs"


# ---- over the end of an epoch


@pytest.mark.parametrize(
    ("known", "methods", "whole", "untouched", "strays"),
    list(product(WAYS, (0, 2, 4), *[(False, True)] * 3)),
)
def test_the_first_choice_over_an_end(known: str, methods: int, whole: bool, untouched: bool, strays: bool) -> None:
    choice = first_choice(known, methods=methods, whole=whole, untouched=untouched, strays=strays)
    if methods == 4 and not whole:
        assert choice == KEPT
    elif strays:
        assert choice == REPLAY, "the generators are not what they were: no other way can be right"
    elif known == KEPT and untouched:
        assert choice == "", "it may not know that it is within an epoch: it is tried"
    else:
        assert choice == known


FIRSTS = [
    EpochBeginning(digest, behind, failure)
    for digest in (None, 1, 2)
    for behind in (b"", b"s")
    for failure in ("", "x")
]


@pytest.mark.parametrize("right", FIRSTS)
def test_the_right_way_is_the_one_that_agrees(right: EpochBeginning) -> None:
    for kept, fresh in product(FIRSTS, FIRSTS):
        way = right_crossing(right, kept, fresh)
        assert {KEPT: kept == right, FRESH: fresh == right, REPLAY: right not in (kept, fresh)}[way]
        if lead_to_same_epoch(kept, fresh, awaited=right.digest, whole=True):
            assert kept == fresh
            assert right.digest in (None, fresh.digest)
        if lead_to_same_epoch(kept, fresh, awaited=None, whole=False):
            assert kept.alike(fresh)


@pytest.mark.parametrize("known", [way for way in WAYS if way != REPLAY])
def test_a_verification_tries_no_less_careful_way(known: str) -> None:
    assert to_try(known) == ((FRESH,) if known == FRESH else (KEPT, FRESH))
    assert to_try(REPLAY) == ()


@given(histories())
def test_a_route_ends_at_its_target(history: History) -> None:
    target = history.target
    for epoch in range(target.epoch + 1):
        *before, last = route(epoch, target)
        assert (last.epoch, last.total, last.abandons, last.digest) == (target.epoch, target.total, False, 7)
        assert [leg.epoch for leg in before] == sorted(e for e in target.abandoned if e >= epoch)
        assert all(leg.abandons and not leg.digest and leg.total <= target.total for leg in before)
