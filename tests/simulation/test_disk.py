"""Contract for the journal and the store, on SQLite and on the simulated disk: what the simulation finds out about
the coordinator holds for the real one only if the two disks agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulated.disk import Disk, Fate, SimulatedJournal, SimulatedStore
from simulated.virtual import Crash

from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.journal.snapshot_index import (
    Drop,
    DropAttempt,
    DropBlob,
    DropSnapshot,
    DurableSnapshot,
    SlotKey,
)
from penstock.appliance.journal.snapshot_store import Store
from penstock.proto.errors import JournalError
from penstock.proto.v1 import coordinator_pb2 as pb

KEY = SlotKey("job/0", 1, 0, 0)
SLOT = {**KEY._asdict(), "generation": 3, "phase": 2, "worker": "w", "session": "s", "ever_ready": True}
SLOT |= {"recovery": False, "restarts": 1, "note": "why", "capabilities": b"\x00\x01", "error": None}


class Media:
    """A place that journals and stores are opened on, again and again."""

    def __init__(
        self, journal: Callable[[], Journal], store: Callable[[], Store], as_it_is: Callable[[], Callable[[], None]]
    ) -> None:
        self._journal, self._store, self._as_it_is = journal, store, as_it_is
        self._open: list[Journal | Store] = []

    def journal(self) -> Journal:
        self._open.append(self._journal())
        return self._open[-1]  # type: ignore[return-value]

    def store(self) -> Store:
        self._open.append(self._store())
        return self._open[-1]  # type: ignore[return-value]

    def as_it_is(self) -> Callable[[], None]:
        """Puts the journal back to what it is now, and not what stands beside it: what a damaged log leaves."""
        return self._as_it_is()

    def crash(self) -> None:
        """Close what is open without a commit. (A commit that was not begun is not on SQLite's disk either.)"""
        for one in self._open:
            one.close()
        self._open.clear()


@pytest.fixture(params=["sqlite", "simulated"])
def media(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Media]:
    if request.param == "sqlite":
        directory = StateDir(tmp_path / "state")
        file = directory.path / "journal.db"

        def as_it_is() -> Callable[[], None]:
            held = {path: path.read_bytes() for path in (file, file.with_name("journal.db-wal"))}

            def put_back() -> None:
                for path, data in held.items():
                    path.write_bytes(data)

            return put_back

        made = Media(lambda: Journal(directory), lambda: Store(directory), as_it_is)
        yield made
        made.crash()
        directory.close()
    else:
        disk = Disk()

        def earlier() -> Callable[[], None]:
            held = copy.deepcopy({**vars(disk), "recorded": None})
            return lambda: vars(disk).update(held, recorded=disk.recorded)

        yield Media(lambda: SimulatedJournal(disk), lambda: SimulatedStore(disk), earlier)


def run(name: str, attempt: int) -> dict[str, object]:
    return {"run": name, "seed": str(2**64 - 1), "num_boxes": 1, "num_workers": 2, "attempt": attempt, "generation": 7}


def test_committed_rows_survive_a_crash(media: Media) -> None:
    journal = media.journal()
    journal.put("runs", run("job/0", 1))
    journal.put("slots", SLOT)
    journal.commit()
    media.crash()
    journal = media.journal()
    assert [dict(row) for row in journal.rows("runs")] == [run("job/0", 1)]
    (slot,) = journal.rows("slots")
    assert dict(slot) == SLOT
    assert (type(slot["ever_ready"]), slot["capabilities"], slot["error"]) == (int, b"\x00\x01", None)


def test_callable_value_is_made_where_written(media: Media) -> None:
    journal, made = media.journal(), list[int]()
    journal.put("slots", SLOT | {"capabilities": lambda: bytes([len(made)])})
    made.append(1)
    journal.commit()
    media.crash()
    (slot,) = media.journal().rows("slots")
    assert slot["capabilities"] == b"\x01"


def test_journal_that_lost_commits_is_refused(media: Media) -> None:
    journal = media.journal()
    journal.put("runs", run("job/0", 1))
    journal.commit()
    put_back = media.as_it_is()
    journal.put("runs", run("job/0", 2))
    journal.commit()
    number = journal.committed
    journal.confirm(journal.mark(), "one that heard it from this very process")
    media.crash()
    put_back()
    with pytest.raises(JournalError, match=f"ends at commit {number - 1}, but commit {number} was made, as .* shows"):
        media.journal()


def test_what_was_not_committed_is_not(media: Media) -> None:
    journal = media.journal()
    journal.put("runs", run("job/0", 1))
    journal.commit()
    journal.put("runs", run("job/0", 2))
    journal.put("runs", run("job/1", 1))
    journal.drop("runs", run="job/0")
    media.crash()
    assert [(row["run"], row["attempt"]) for row in media.journal().rows("runs")] == [("job/0", 1)]


def test_rows_are_whole_and_ordered_by_key(media: Media) -> None:
    journal = media.journal()
    for name in ("job/2", "job/10", "job/1"):
        journal.put("runs", run(name, 1))
    journal.put("runs", run("job/1", 2))
    journal.commit()
    journal.put("runs", run("job/1", 3) | {"and": "what no column is for"})
    journal.commit()
    journal.commit()  # nothing to write is no error
    assert [(row["run"], row["attempt"]) for row in journal.rows("runs")] == [("job/1", 3), ("job/10", 1), ("job/2", 1)]
    with pytest.raises(KeyError):
        journal.put("runs", {"run": "job/1"})


def test_drops_and_puts_happen_in_their_order(media: Media) -> None:
    journal = media.journal()
    for number in (1, 2):
        for slot in (0, 1):
            journal.put("slots", SLOT | {"attempt": number, "slot": slot})
    journal.drop("slots", run="job/0", attempt=1)
    journal.put("slots", SLOT | {"attempt": 1, "slot": 5})
    journal.commit()
    assert [(row["attempt"], row["slot"]) for row in journal.rows("slots")] == [(1, 5), (2, 0), (2, 1)]
    journal.drop("slots", run="job/0")
    journal.drop("slots", run="nobody")
    journal.commit()
    assert journal.rows("slots") == []


def test_secret_stays_and_boots_are_counted(media: Media) -> None:
    first = media.journal()
    secret, boots = first.secret, first.boots
    media.crash()
    second = media.journal()
    assert (second.secret, second.boots) == (secret, boots + 1)
    assert len(secret) == 32


def header(total: int, epoch: int, *, attempt: int = 1) -> pb.SnapshotHeader:
    return pb.SnapshotHeader(**KEY._replace(attempt=attempt)._asdict(), total=total, epoch=epoch, generation=1)


def test_store_keeps_values_until_dropped(media: Media) -> None:
    store = media.store()
    store.put_snapshots([(header(4, 0), b"four")])
    store.put_snapshots([(header(4, 1), b"of the next epoch")])
    store.put_snapshots([(header(4, 0), b"FOUR again")])
    store.put_snapshots([(header(9, 0, attempt=2), b"x")])
    store.put_blob("name", b"blob")
    media.crash()
    store = media.store()
    assert store.snapshot(KEY, DurableSnapshot(4, 0, 10)) == (header(4, 0), b"FOUR again")
    assert (store.blob("name"), store.blob("no such")) == (b"blob", None)
    kept, blobs = store.index()
    assert sorted(kept) == [
        (KEY, DurableSnapshot(4, 0, 10)),
        (KEY, DurableSnapshot(4, 1, 17)),
        (KEY._replace(attempt=2), DurableSnapshot(9, 0, 1)),
    ]
    assert blobs == [("name", 4)]
    left: list[Drop] = [DropSnapshot(KEY, 4, 0), DropSnapshot(KEY, 77, 0), DropAttempt("job/0", 2), DropBlob("name")]
    while left:
        left = store.drop(left)
    assert store.index() == ([(KEY, DurableSnapshot(4, 1, 17))], [])
    assert store.snapshot(KEY, DurableSnapshot(4, 0, 10)) is None


@pytest.mark.parametrize(("fate", "rows"), [(Fate.LOST, 0), (Fate.UNHEARD, 1)])
def test_crash_around_the_sync_ends_the_writer(fate: Fate, rows: int) -> None:
    disk = Disk()
    journal = SimulatedJournal(disk, lambda: fate)
    for name in ("job/0", "job/9"):  # the process is dead: what it still tries reaches nothing
        journal.put("runs", run(name, 1))
        with pytest.raises(Crash):
            journal.commit()
    assert len(SimulatedJournal(disk).rows("runs")) == rows
