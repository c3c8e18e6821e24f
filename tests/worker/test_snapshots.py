"""Restart points that a daemon keeps of a slot, and which of them serves a position."""

from __future__ import annotations

import pytest

from penstock.worker.slots import snapshots
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot


def point(
    total: int, *, epoch: int = 0, began: int = 0, epoch_start: bool = False, step: int = 0, spent_s: float = 0.0
) -> StoredSnapshot:
    return StoredSnapshot(epoch, total - began, total, 0, epoch_start, step, bytes(10), spent_s=spent_s)


def totals(store: SlotSnapshots) -> list[int]:
    return [kept.total for kept in store]


def test_what_the_oldest_wanted_position_needs_stays() -> None:
    """The newest before it, the newest that lies far enough before it to be compared, and the epoch's start."""
    store = SlotSnapshots()
    for total in (0, 50, 130, 140, 190):
        store.add(point(total, epoch_start=not total), 0)
    store.add(point(205), oldest_wanted=200)
    assert totals(store) == [0, 130, 190, 205]


@pytest.mark.parametrize(
    ("total", "spent_s", "replay_s", "expected"),
    [
        (110, 1.5, 2.0, 10),  # the whole epoch is made again as quickly
        (110, 9.0, 2.0, 30),  # 80 batches behind it, 50 would be too few
        (110, 9.0, float("inf"), 10),
        (10, None, 0.0, 10),
        (20, 9.0, 2.0, 10),  # its own epoch's start, as no snapshot is before it
    ],
)
def test_a_position_of_a_pure_loader(total: int, spent_s: float | None, replay_s: float, expected: int) -> None:
    store = SlotSnapshots()
    for kept in (
        *(point(0, epoch_start=True), point(9)),
        *(point(10, epoch=1, began=10, epoch_start=True), point(30, epoch=1, began=10, spent_s=6.0)),
        *(point(60, epoch=1, began=10, spent_s=8.0), point(90, epoch=1, began=10, spent_s=8.5)),
    ):
        store.add(kept, 0)
    found = store.within(1, total, 10, spent_s, replay_s)
    assert found is not None
    assert (found.epoch, found.total) == (1, expected)


def test_epochs_ahead_of_loop_push_nothing_out() -> None:
    """A slot without batches makes the origins of many epochs ahead, all of one total."""
    store = SlotSnapshots()
    for epoch in range(5, 40):
        store.add(point(0, epoch=epoch, epoch_start=True), 0, oldest_epoch=7)
    assert [kept.epoch for kept in store] == list(range(7, 40))


def test_points_beyond_abandoned_end_are_dropped() -> None:
    store = SlotSnapshots()
    for total in (1, 2, 3):
        store.add(point(total), 0)
    store.add(point(3, epoch=1, epoch_start=True), 0)
    store.forget_after(0, 2)
    assert totals(store) == [1, 2]


def test_room_is_bounded_and_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_BYTES", 1000)
    store = SlotSnapshots()
    store.add(point(0, epoch_start=True), 0)
    for total in range(1, 500):
        store.add(point(total), 0)
        assert sum(len(kept.data) for kept in store) <= 1010
    kept = totals(store)
    assert kept[0] == 0
    assert kept[-1] == 499


def test_newest_at_far_edge_of_window_stays() -> None:
    store = SlotSnapshots()
    store.add(point(0, epoch_start=True), 0)
    for total in range(1, 11):
        store.add(point(total), oldest_wanted=6)
    assert totals(store) == [0, 6, 7, 8, 9, 10]


def test_exactly_compares_position_and_step() -> None:
    store = SlotSnapshots()
    store.add(point(3, step=5), 0)
    assert store.exactly(0, 3, 3, 5) is not None
    assert store.exactly(0, 3, 3, 6) is None
    assert store.exactly(0, 2, 2, 5) is None
    store.add(point(4), 0)
    assert store.exactly(0, 4, 4, 7) is not None


def test_a_restart_point_replaces_one_at_its_position() -> None:
    store = SlotSnapshots()
    for data in (b"old", b"new"):
        store.add(StoredSnapshot(0, 3, 3, 3, False, 0, data), 0)
    assert [point.data for point in store] == [b"new"]
