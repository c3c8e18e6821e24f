"""A coordinator's disk that others have filled: rows are written and removed, and large values are refused."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import TOKEN, asking, coordinator, daemon, opening, until_ready
from small_disk import fill, small_disk_at

from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.journal.snapshot_index import Drop, DropAttempt
from penstock.appliance.journal.snapshot_store import ClosedRun, Store
from penstock.appliance.limits import DISK_BUDGET, Limits, default_budget
from penstock.proto.errors import JournalError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", 64 * MIB) as disk:
        yield disk


def header(total: int) -> pb.SnapshotHeader:
    return pb.SnapshotHeader(run="job/0", attempt=1, total=total)


def row(attempt: int) -> dict[str, object]:
    return {"run": "job/0", "attempt": attempt, "key": "", "opened_by": "", "state": "open", "why": ""}


def test_what_is_reserved_serves_the_journal_and_removals(disk: Path) -> None:
    state = StateDir(disk / "state")
    journal, store = Journal(state), Store(state)
    for total in range(20):
        store.put_snapshots([(header(total), bytes(MIB))])
    for opened in (journal, store):
        opened.close()  # with their logs, so that they begin anew as after a restart
    journal, store = Journal(state), Store(state)
    store.reserve()
    ballast = fill(disk)
    for attempt in range(3000):  # more than the log holds
        journal.put("attempts", row(attempt))
        journal.commit()
    with pytest.raises(
        JournalError, match=r"snapshots\.db: 1 snapshots of 1048576 bytes .* must be free .*, got \d+\."
    ):
        store.put_snapshots([(header(100), bytes(MIB))])
    with pytest.raises(JournalError, match="a value of"):
        store.put_blob("blob", bytes(MIB))
    with pytest.raises(JournalError, match="a state of"):
        store.keep_closed(ClosedRun("job/0", 1, 1, 0.0, MIB), [bytes(MIB)], [])
    left: list[Drop] = [DropAttempt("job/0", 1)]
    while left:
        left = store.drop(left)
    assert store.index() == ([], [])
    ballast.unlink()
    store.put_snapshots([(header(100), bytes(MIB))])
    for opened in (journal, store):
        opened.close()
    state.close()


def test_snapshots_leave_most_of_the_disk_free(disk: Path) -> None:
    """What is written twice for a while fits beside them: a disk is never filled by its coordinator."""
    budget = default_budget(disk)
    assert budget == int(0.4 * 64 * MIB)
    state = StateDir(disk / "state")
    store = Store(state)
    store.reserve()
    for total in range(3):
        store.put_snapshots([(header(total), bytes(budget))])
        assert store.drop([DropAttempt("job/0", 1)]) == []
    store.close()
    state.close()
    assert default_budget(Path("/")) <= DISK_BUDGET
    assert default_budget(None) == 512 * MIB


def test_states_are_saved_and_runs_opened_meanwhile(disk: Path) -> None:
    async def run() -> None:
        async with (
            coordinator(disk / "state") as address,
            AsyncCoordinatorClient(address, TOKEN, insecure=True) as client,
            daemon(address),
        ):
            await client.open_run(opening())
            await until_ready(client)
            fill(disk)
            for step in range(1, 50):
                found = await client.fetch_state(asking(0, step, deadline_s=20.0))
                assert len(found.records) == 2
            assert (await client.open_run(opening(job="another"))).run == "another/0"

    asyncio.run(run())


async def open_many(client: AsyncCoordinatorClient) -> None:
    for number in itertools.count():  # until the journal's log takes no more
        await client.open_run(opening(job=f"job{number}"))


def test_without_a_reserve_the_error_is_logged_once_and_heals(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator that was started on a disk that is almost full."""

    async def run() -> None:
        ballast = fill(disk, 3 * MIB)
        async with (
            coordinator(disk / "state", Limits()) as address,
            AsyncCoordinatorClient(address, TOKEN, insecure=True) as client,
        ):
            rest = fill(disk)
            with pytest.raises(JournalError, match="cannot be written"):
                await open_many(client)
            await asyncio.sleep(2.0)  # six ticks
            errors = [one for one in caplog.records if "cannot be written" in one.getMessage()]
            assert [one.levelno for one in errors] == [logging.ERROR]
            for file in (ballast, rest):
                file.unlink()
            await client.open_run(opening())

    asyncio.run(run())
    assert "of which nothing can be reserved. Free space" in caplog.text
