"""The ways to the disk: the bound on what comes in, commits that are shared, pieces, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from coroutines import in_loop
from fake_cluster import limited

from penstock.appliance.journal.journal import GroupCommit, Journal, Rows, StateDir
from penstock.appliance.journal.snapshot_index import Drop, DropAttempt
from penstock.appliance.journal.snapshot_store import (
    PIECE,
    InflowBudget,
    MemoryBudget,
    SnapshotWriter,
    Store,
)
from penstock.appliance.server.transfers import MinimumRate
from penstock.proto.errors import DeadlineError, JournalError
from penstock.proto.v1 import coordinator_pb2 as pb

DEADLINE_S = 60.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    directory = StateDir(tmp_path / "state")
    yield directory
    directory.close()


def header(total: int, attempt: int = 1) -> pb.SnapshotHeader:
    return pb.SnapshotHeader(run="job/0", attempt=attempt, total=total)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_values_are_admitted_in_order() -> None:
    inflow, came = MemoryBudget(100), list[str]()
    gates = {name: asyncio.Event() for name in "abcd"}

    async def one(name: str, size: int) -> None:
        async with inflow.taken(size):
            came.append(name)
            await gates[name].wait()

    tasks = [asyncio.create_task(one(*each)) for each in (("a", 60), ("b", 500), ("c", 10), ("d", 10))]
    await turn()
    assert came == ["a"]  # b is too large to come beside a, and c does not overtake it
    gates["a"].set()
    await turn()
    assert came == ["a", "b"]
    gates["b"].set()
    await turn()
    assert came == ["a", "b", "c", "d"]
    gates["c"].set()
    gates["d"].set()
    await asyncio.gather(*tasks)
    assert inflow._used == 0


@in_loop
async def test_small_values_pass_large_ones() -> None:
    inflow, go, came = InflowBudget(1000), asyncio.Event(), list[int]()

    async def one(size: int) -> None:
        async with inflow.taken(size):
            came.append(size)
            await go.wait()

    tasks = [asyncio.create_task(one(size)) for size in (70_000, 600, 125, 125, 125, 125, 1)]
    await turn()
    assert came == [70_000, 125, 125, 125, 125]
    go.set()
    await asyncio.gather(*tasks)
    assert sorted(came[5:]) == [1, 600]


@in_loop
async def test_cancelled_turn_gives_nothing_back() -> None:
    inflow, go = MemoryBudget(100), asyncio.Event()

    async def one(size: int) -> None:
        async with inflow.taken(size):
            await go.wait()

    first = asyncio.create_task(one(100))
    await turn()
    second = asyncio.create_task(one(50))
    await turn()
    go.set()  # the first one's turn is before the second one hears that it was cancelled
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert inflow._used == 0


@limited(part_s=0.2, least_bytes_per_s=1_000_000)
@in_loop
async def test_sender_keeps_waiting_at_its_rate() -> None:
    """However often something comes."""

    async def bytes_in(pause_s: float, count: int) -> AsyncIterator[pb.BlobPart]:
        for _ in range(count):
            await asyncio.sleep(pause_s)
            yield pb.BlobPart(data=b"x")

    with pytest.raises(DeadlineError, match=r"^blob: .* bytes came in"):
        async for _ in MinimumRate("blob", bytes_in(0.01, 10_000)):
            pass
    with pytest.raises(DeadlineError, match=r"or none for 0\.2 s"):
        async for _ in MinimumRate("blob", bytes_in(100.0, 1)):
            pass


@in_loop
async def test_failed_commit_reaches_all_and_next_works(state: StateDir) -> None:
    store = Store(state)
    writer = SnapshotWriter(store)
    store._db.execute("PRAGMA max_page_count=10")
    results = await asyncio.gather(
        *(writer.put_snapshot(header(n), bytes(100_000)) for n in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [JournalError] * 3
    assert store.index() == ([], [])
    store._db.execute("PRAGMA max_page_count=100000")
    await writer.put_snapshot(header(7), b"x")
    writer.close()
    store.close()


def test_an_attempt_is_dropped_in_pieces(state: StateDir) -> None:
    store = Store(state)
    store.put_snapshots([(header(total), b"x") for total in range(2 * PIECE + 10)])
    store.put_snapshots([(header(1, attempt=2), b"y")])
    left: list[Drop] = [DropAttempt("job/0", 1), DropAttempt("job/0", 3)]
    sizes = []
    while left:
        left = store.drop(left)
        sizes.append(len(store.index()[0]))
    assert sizes == [PIECE + 11, 11, 1]
    store.close()


def attempt(number: int) -> dict[str, object]:
    return {"run": "job/0", "attempt": number, "key": "", "opened_by": "", "state": "open", "why": ""}


@in_loop
async def test_calls_share_a_commit_and_return_after_it(state: StateDir) -> None:
    journal = Journal(state)
    syncing = GroupCommit(journal)
    written: list[int] = []
    write = journal.write

    def counted(rows: Rows) -> None:
        written.append(len(rows))
        write(rows)

    journal.write = counted  # type: ignore[method-assign]

    async def call(number: int) -> None:
        async with syncing.synced():
            journal.put("attempts", attempt(number))
            journal.commit()
        assert number in {row["attempt"] for row in journal.rows("attempts")}

    await asyncio.gather(*(call(number) for number in range(50)))
    assert sum(written) == 50
    assert len(written) <= 2
    await syncing.sync()  # nothing to write
    assert len(written) <= 2
    syncing.close()
    journal.close()


def test_bad_row_leaves_no_open_transaction(state: StateDir) -> None:
    journal = Journal(state)
    journal.put("attempts", attempt(1) | {"attempt": 1 << 64})
    with pytest.raises(OverflowError):
        journal.write(journal.take())
    journal.put("attempts", attempt(2))
    journal.commit()
    assert [row["attempt"] for row in journal.rows("attempts")] == [2]
    journal.close()


@in_loop
async def test_an_error_leaves_after_what_it_speaks_of(state: StateDir) -> None:
    journal = Journal(state)
    syncing = GroupCommit(journal)

    async def refused() -> None:
        async with syncing.synced():
            journal.put("attempts", attempt(2))
            raise KeyError

    with pytest.raises(KeyError):
        await refused()
    assert [row["attempt"] for row in journal.rows("attempts")] == [2]
    syncing.close()
    journal.close()
