"""Restart points that a daemon keeps of a slot, and which of them serves a position."""

from __future__ import annotations

import pytest

from penstock.worker.slots import snapshots
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot


def point(
    total: int, *, epoch: int = 0, epoch_start: bool = False, step: int = 0, size: int = 10, verified: bool = False
) -> StoredSnapshot:
    return StoredSnapshot(epoch, total, total, 0, epoch_start, step, bytes(size), verified=verified)


def totals(store: SlotSnapshots) -> list[int]:
    return [kept.total for kept in store]


def test_newest_at_far_edge_of_window_stays() -> None:
    store = SlotSnapshots()
    store.add(point(0, epoch_start=True, verified=True), 0)
    for total in range(1, 11):
        store.add(point(total), oldest_wanted=6)
    assert totals(store) == [0, 6, 7, 8, 9, 10]


def test_the_newest_verified_one_stays() -> None:
    store = SlotSnapshots()
    for kept in (point(0, epoch_start=True, verified=True), point(3), point(4, verified=True), point(5), point(6)):
        store.add(kept, 0)
    store.add(point(9), oldest_wanted=8)
    assert totals(store) == [4, 6, 9]


def test_epochs_ahead_of_loop_push_nothing_out() -> None:
    """A slot without batches makes the origins of many epochs ahead, all of one total."""
    store = SlotSnapshots()
    for epoch in range(5, 40):
        store.add(point(0, epoch=epoch, epoch_start=True), 0, oldest_epoch=7)
    assert [kept.epoch for kept in store] == list(range(7, 40))


def test_exactly_compares_position_and_step() -> None:
    store = SlotSnapshots()
    store.add(point(3, step=5), 0)
    assert store.exactly(0, 3, 3, 5) is not None
    assert store.exactly(0, 3, 3, 6) is None
    assert store.exactly(0, 2, 2, 5) is None
    store.add(point(4), 0)
    assert store.exactly(0, 4, 4, 7) is not None


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
