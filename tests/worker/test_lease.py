"""The slot of a batch that is being built: reserved, matched, given back, and never in two hands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.proto.batch.flatten import FlatBatch, Flattener
from penstock.proto.lane.producer import FreeEntry, Producer
from penstock.worker.batch import entry_lease as module
from penstock.worker.batch.entry_lease import VAIN_LIMIT, EntryLease

SLOT = 4096
SLOTS = 32


def never() -> bool:
    raise AssertionError("it waited")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_FROM", 0)


@pytest.fixture
def producer() -> Iterator[Producer]:
    """A producer with a ring of 32 entries of 4 KiB, all free."""
    made = Producer(1 << 20)
    first = made.reserve(SLOT)
    assert first is not None
    made.return_unused(first)
    assert (made.ring_entries, made.free_entries) == (SLOTS, SLOTS)
    yield made
    made.close()


@pytest.fixture
def lease(producer: Producer) -> EntryLease:
    made = EntryLease(producer, never)
    made.offered = True
    return made


def leaf(lease: EntryLease, values: Any) -> torch.Tensor:
    """A tensor of int64 in the slot."""
    arena = lease.begin()
    assert arena is not None
    at = lease.place(arena, 8 * len(values))
    assert at is not None
    made = torch.from_numpy(np.ndarray((len(values),), np.int64, arena, at))
    made.copy_(torch.as_tensor(values))
    return made


def take(lease: EntryLease, batch: list[Any], need: int = 0) -> tuple[FlatBatch, FreeEntry | None]:
    """Do what the runner does with a batch that has no other holder; the list is emptied."""
    flat = Flattener().flatten(tuple(batch))
    batch.clear()
    return flat, lease.take(flat, need or flat.nbytes)


def written(flat: FlatBatch, reserved: FreeEntry) -> np.ndarray[Any, np.dtype[np.int64]]:
    flat.write_to(reserved.ring.address + reserved.offset)
    return np.frombuffer(bytes(reserved.view[: flat.nbytes]), np.int64)


def in_place(lease: EntryLease, make: Callable[[], list[Any]]) -> list[int]:
    """Take a batch that must stay where it was built, without one byte moved."""
    built = lease.built
    batch = make()
    before = torch.cat([part.flatten() for part in batch]).tolist()
    flat, reserved = take(lease, batch)
    assert reserved is not None
    assert lease.built == built + 1
    got = written(flat, reserved)
    lease._producer.return_unused(reserved)
    assert [value for value in got.tolist() if value] == [value for value in before if value]
    return list(got)


def copied(lease: EntryLease, batch: list[Any]) -> list[int]:
    """Take a batch that must not be published where it is; what another slot then holds."""
    flat, reserved = take(lease, batch)
    assert reserved is None
    other = lease._producer.reserve(flat.nbytes)
    assert other is not None
    got = written(flat, other).tolist()
    lease._producer.return_unused(other)
    return list(got)


def test_held_batch_is_copied_and_stays_unchanged(lease: EntryLease, producer: Producer) -> None:
    held = leaf(lease, [1, 2])
    assert copied(lease, [held])[:2] == [1, 2]
    assert producer.free_entries == SLOTS - 1, "the slot stays with its holder"
    assert lease.begin() is None, "one slot at a time"
    assert held.tolist() == [1, 2]
    del held
    in_place(lease, lambda: [leaf(lease, [3])])
    assert producer.free_entries == SLOTS


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[1:],
        lambda t: memoryview(t.numpy()),
        lambda t: t.untyped_storage(),
        lambda t: t.__dlpack__(),
    ],
)
def test_whatever_holds_a_piece_of_it(lease: EntryLease, hold: Callable[[torch.Tensor], Any]) -> None:
    made = leaf(lease, [1, 2])
    holder = hold(made)
    batch = [made]
    del made
    assert copied(lease, batch)[:2] == [1, 2]
    del holder
    in_place(lease, lambda: [leaf(lease, [3])])


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: [b, a],
        lambda a, b: [a, a],
        lambda a, b: [a, torch.tensor([0]), b],
        lambda a, b: [a.numpy(), b.numpy()[::-1]],
        lambda a, b: [a[1:], b],
        lambda a, b: [a.reshape(4, 2).T, b],
    ],
)
def test_misplaced_leaves_are_copied_whole(lease: EntryLease, change: Callable[..., list[Any]]) -> None:
    def make() -> list[Any]:
        return change(leaf(lease, range(1, 9)), leaf(lease, range(11, 20)))

    expected = Flattener().flatten(tuple(copy.deepcopy(make())))
    memory = np.zeros(expected.nbytes, np.uint8)
    expected.write_to(memory.ctypes.data)
    assert copied(lease, make()) == memory.view(np.int64).tolist()


def test_dropped_batch_frees_the_whole_entry(lease: EntryLease, producer: Producer) -> None:
    for _ in range(100):
        leaf(lease, range(300))
    in_place(lease, lambda: [leaf(lease, [1])])
    leaf(lease, [1])
    assert producer.free_entries == SLOTS - 1
    lease.release()
    assert producer.free_entries == SLOTS


def test_a_leaf_in_an_outgrown_ring_is_copied(lease: EntryLease, producer: Producer) -> None:
    """A consumer has dropped that ring when it met the larger one."""
    batch = [leaf(lease, [1, 2])]
    larger = producer.reserve(2 * SLOT)
    assert larger is not None
    producer.return_unused(larger)
    assert copied(lease, batch)[:2] == [1, 2]


def test_lease_waits_for_an_entry_until_told(producer: Producer) -> None:
    taken = [producer.reserve(1) for _ in range(SLOTS)]
    answers = [False, True, True]

    def wait() -> bool:
        if len(answers) == 1:
            reserved = taken.pop()
            assert reserved is not None
            producer.return_unused(reserved)
        return answers.pop(0)

    lease = EntryLease(producer, wait)
    lease.offered = True
    assert lease.begin() is None
    assert answers == [True, True]
    assert lease.begin() is not None
    assert answers == []


def test_keeper_of_batches_gets_ordinary_memory(lease: EntryLease) -> None:
    for number in range(1, VAIN_LIMIT + 1):
        kept = leaf(lease, [number])
        copied(lease, [kept])
        del kept
    assert lease.begin() is None
    lease.release()
    assert lease.begin() is not None


def test_entry_visible_to_a_child_is_not_reused(lease: EntryLease, producer: Producer) -> None:
    batch = [leaf(lease, [1, 2])]
    lease.forking()
    assert copied(lease, batch)[:2] == [1, 2]
    for _ in range(3):
        assert lease.begin() is None
        lease.release()
        assert producer.free_entries == SLOTS - 1
    larger = producer.reserve(2 * SLOT)
    assert larger is not None
    producer.return_unused(larger)
    in_place(lease, lambda: [leaf(lease, [3])])
    assert producer.free_entries == producer.ring_entries
