"""The cluster state on disk: what survives, and what is refused loudly."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker

from penstock.appliance.core.state_machine import RETURN_S
from penstock.appliance.journal.database import SCHEMA
from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.journal.snapshot_index import DropAttempt, DurableSnapshot, SlotKey
from penstock.appliance.journal.snapshot_store import Store
from penstock.proto.errors import BoxTakenError, JournalError, TopologyError
from penstock.proto.v1 import coordinator_pb2 as pb

KEY = SlotKey("job/0", 1, 0, 0)


def header(key: SlotKey, total: int, epoch: int, generation: int) -> pb.SnapshotHeader:
    return pb.SnapshotHeader(**key._asdict(), total=total, epoch=epoch, generation=generation, delivered=3, step=7)


def restarted(world: FakeCluster) -> None:
    world.now += 1  # its clock goes on; what lease was left is not counted
    world.restart()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def running(directory: StateDir) -> tuple[FakeCluster, FakeBox, FakeWorker]:
    world = FakeCluster(directory=directory)
    box, worker = world.open(has_seed=True, seed=2**63 + 1), world.worker("w")
    worker.ready()
    return world, box, worker


# ------------------------------------------------------------------------------------------------------------ restarts


def test_leases_after_host_change_cover_lookup(state: StateDir) -> None:
    world, _, worker = running(state)
    world.host = "another-host"
    restarted(world)
    world.run_for(RETURN_S - 1)
    worker.register()  # it waited for the old one's pings, and for a connection
    worker.ready()
    assert {a.generation for a in worker.heartbeat().assignments} == {1}
    world.run_for(world.limits.worker_lease_s + 1)
    assert worker.heartbeat().register_again, "from then on its lease is as long as any"
    restarted(world)  # on the same host
    world.worker("other")
    world.run_for(world.limits.worker_lease_s + 1)
    assert worker.heartbeat().register_again


SECRET = "0123456789abcdef" * 2


def test_client_secret_is_proven_and_not_stored(state: StateDir) -> None:
    """An error told it: with it a stranger had the lane tickets of another's run, closed it, and broke its saves."""
    world = FakeCluster(directory=state)
    mine = world.open(client_id=SECRET, num_boxes=2)
    with pytest.raises(BoxTakenError) as taken:
        world.open(client_id="stranger", num_boxes=2)
    restarted(world)
    mine.watch()
    held = world.state_machine.cluster.open_attempts()[0].boxes[0]
    said = [
        taken.value.message,
        held.who(),
        held.client,
        str(world.state_machine.cluster.events.messages()),
        repr(held),
    ]
    for shown in (*re.findall(r"[0-9a-f]{8,}", " ".join(said)), held.client):
        for call in (mine.watch, mine.close):
            mine.request.client_id = shown
            with pytest.raises(BoxTakenError) as refused:
                call()
            said.append(refused.value.message)
    mine.request.client_id = SECRET
    assert world.open(client_id=SECRET, num_boxes=2).reply == mine.reply
    world.open(client_id="next", num_boxes=2, attempt_key="next")  # which supersedes it
    said.append(mine.refused().message)
    world.journal.close()
    said += [path.read_bytes().decode("latin-1") for path in state.path.iterdir()]
    assert not [text for text in said if SECRET in text]


def test_boxes_of_older_release_keep_clients(state: StateDir) -> None:
    """Accept journals with the client secrets themselves, as an older release kept them."""
    world, box, _ = running(state)
    for row in world.journal.rows("boxes"):
        opened = pb.OpenRunRequest.FromString(row["opening"])
        opened.client_id = "client-0"
        world.journal.put("boxes", {**row, "client_id": "client-0", "opening": opened.SerializeToString()})
    world.journal.commit()
    restarted(world)
    box.watch()
    assert not world.state_machine.cluster.open_attempts()[0].boxes[0].opening.client_id


def test_an_error_that_was_final_stays_final(state: StateDir) -> None:
    world, box, worker = running(state)
    report = worker.slot_report(worker.of(0), pb.FAILED)
    report.error.name, report.error.message = "InputFnError", "boom"
    worker.heartbeat(report)
    restarted(world)
    worker.register()
    slot = box.watch().slots[0]
    assert (slot.phase, slot.error.message, bool(slot.ticket)) == (pb.FAILED, "boom", True)


def test_ended_attempts_snapshots_drop_at_start(state: StateDir) -> None:
    world, _, _ = running(state)
    store = Store(state)
    store.put_snapshots([(header(KEY, 4, 0, 1), b"data")])
    store.put_snapshots([(header(KEY._replace(attempt=7), 4, 0, 1), b"stray")])
    world.journal.close()
    journal = Journal(state)
    world.snapshot_index.load(*store.index(), 0.0)
    world.state_machine = type(world.state_machine)(
        journal,
        world.snapshot_index,
        world.limits,
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        fresh_seed=lambda: 1,
        changed=print,
    )
    assert world.snapshot_index.take_drops() == [DropAttempt("job/0", 7)]
    assert world.snapshot_index.snapshots(KEY) == [DurableSnapshot(4, 0, 4)]
    journal.close()
    store.close()


# --------------------------------------------------------------------------------------------------- nothing unwritten


def test_tables_of_this_release_are_added(state: StateDir) -> None:
    world, _, _ = running(state)
    world.journal._db.execute("DROP TABLE unused")  # as an older release leaves it
    restarted(world)
    with pytest.raises(TopologyError):  # what is not known to be unused counts as used
        world.open(client_id="next", num_workers_per_box=5)


def test_writing_stays_cheap(state: StateDir) -> None:
    """A heartbeat that changes nothing writes nothing."""
    world, box, worker = running(state)
    box.deliver(1)  # after which the run no longer counts as unused
    changes = world.journal._db.total_changes
    for _ in range(10):
        worker.ready()
        box.deliver(1)
        world.state_machine.tick()
    assert world.journal._db.total_changes == changes


# -------------------------------------------------------------------------------------------------------- bad journals


def test_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(JournalError, match=rf"must have mode 0700, got 0755: run chmod 700 {tmp_path}"):
        StateDir(tmp_path)
    tmp_path.chmod(0o700)
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(JournalError, match=r"owner of the state directory .* must be user"):
            StateDir(tmp_path)
        os.chown(tmp_path, 0, 0)
    StateDir(tmp_path).close()


def test_the_directory_is_nobody_else_s(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "new" / "state")
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="file cannot be used"):
        StateDir(tmp_path / "file")


def test_a_newer_journal_is_refused(state: StateDir) -> None:
    Journal(state).close()
    with sqlite3.connect(state.path / "journal.db") as db:
        db.execute(f"PRAGMA user_version={SCHEMA + 1}")
    db.close()
    with pytest.raises(JournalError, match=r"format of database .*journal\.db must be 2, got 3"):
        Journal(state)


@pytest.mark.parametrize("damage", ["not a database", "torn", "one page"])
def test_damaged_journal_is_refused_unchanged(state: StateDir, damage: str) -> None:
    world = FakeCluster(directory=state)
    for number in range(40):
        world.open(job=f"job-{number}", loader=pb.OpenRunRequest().loader.__class__(input_fn="m:" + "f" * 400))
    world.journal.close()
    file = state.path / "journal.db"
    good = file.read_bytes()
    with contextlib.closing(sqlite3.connect(file)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='slots'").fetchone()
    bad = {
        "not a database": b"x" * 8192,
        "torn": good[: len(good) // 2 // 4096 * 4096],
        "one page": good[: (page - 1) * 4096] + b"\xff" * 4096 + good[page * 4096 :],
    }[damage]
    file.write_bytes(bad)
    with pytest.raises(
        JournalError, match=r"journal\.db.*restore a copy of the file, or move the file away to start anew"
    ):
        Journal(state)
    assert file.read_bytes() == bad


def test_missing_journal_is_not_taken_for_new(state: StateDir) -> None:
    Journal(state).close()
    Store(state).close()
    (state.path / "journal.db").unlink()
    with pytest.raises(JournalError, match=r"journal\.db is missing or empty, but snapshots\.db"):
        Journal(state)


def test_a_network_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.files.filesystems.filesystem", lambda path, mounts: "nfs4")
    with pytest.raises(JournalError, match=r"must be on a local disk, got filesystem nfs4"):
        StateDir(tmp_path)


# ------------------------------------------------------------------------------------- commits that cannot be undone


def copied(state: StateDir, to: Path) -> StateDir:
    """The files as they lie: what a coordinator that is killed leaves."""
    shutil.copytree(state.path, to)
    return StateDir(to)


def frames(wal: Path) -> int:
    """Return the number of frames since the log was last begun anew: they have the salts of its head."""
    data = wal.read_bytes()
    salts = data[16:24]
    begins = range(32, len(data), 24 + 4096)
    return next((number for number, at in enumerate(begins) if data[at + 8 : at + 16] != salts), len(begins))


def flip(file: Path, at: int) -> bytes:
    """Flip one bit; return the file's content after it."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    return bytes(data)


def test_flipped_log_bit_is_refused_unchanged(state: StateDir, tmp_path: Path) -> None:
    world, _, worker = running(state)
    for _ in range(3):
        worker.lose(worker.of(1))
        worker.ready()
    expected = world.journal.committed
    good = [dict(row) for row in world.journal.rows("slots")]
    wal = state.path / "journal.db-wal"
    first = 32 + 24  # of a frame in the middle of a commit, in its header, and in the last commit
    for number, frame in enumerate({0, 1, 5, frames(wal) // 2, frames(wal) - 2, frames(wal) - 1}):
        directory = copied(state, tmp_path / f"copy{number}")
        damaged = directory.path / "journal.db-wal"
        held = flip(damaged, first + frame * (24 + 4096) + number * 517)
        with pytest.raises(JournalError, match=r"journal\.db (ends at commit|cannot be read)") as caught:
            Journal(directory)
        assert "restore" in caught.value.message.lower()
        assert damaged.read_bytes() == held
        assert (
            f"but commit {expected} was made, as {directory.path}/journal.commits shows" in caught.value.message
        ) or ("cannot be read" in caught.value.message)
        flip(damaged, first + frame * (24 + 4096) + number * 517)  # nothing was lost: mended, it goes on
        journal = Journal(directory)
        assert [dict(row) for row in journal.rows("slots")] == good
        journal.close()
    world.journal.close()


def test_missing_log_is_noticed_in_both_databases(state: StateDir, tmp_path: Path) -> None:
    journal, store = Journal(state), Store(state)
    journal.put("runs", {"run": "job/0", "seed": "1", "num_boxes": 1, "num_workers": 1, "attempt": 1, "generation": 1})
    journal.commit()
    store.put_blob("name", b"blob")
    for name, opened in (("journal", Journal), ("snapshots", Store)):
        directory = copied(state, tmp_path / name)
        (directory.path / f"{name}.db-wal").unlink()
        with pytest.raises(JournalError, match=rf"{name}\.db "):
            opened(directory)
        directory.close()
        (directory.path / f"{name}.commits").write_bytes(b"1" * 30)
        with pytest.raises(JournalError, match=rf"{name}\.commits is damaged.*remove the file"):
            opened(directory)
    journal.close()
    store.close()


def test_flipped_bit_in_a_value_is_refused(state: StateDir) -> None:
    world = FakeCluster(directory=state)
    world.open(attempt_key="launch-seven")
    world.journal.close()
    file = state.path / "journal.db"
    flip(file, file.read_bytes().index(b"launch-seven") + 3)
    with pytest.raises(
        JournalError, match=r"table attempts, row with run job/0, attempt 1: its checksum does not match"
    ):
        FakeCluster(directory=state)


@pytest.mark.parametrize("who", ["worker", "box"])
def test_older_copy_is_refused_also_at_next_start(state: StateDir, tmp_path: Path, who: str) -> None:
    """The file beside it is older too: workers and training jobs know."""
    world, box, worker = running(state)
    directory = copied(state, tmp_path / "copy")
    worker.lose(worker.of(1))
    shown = box.progress()
    shown.commit_mark = box.watch().commit_mark
    registering = pb.RegisterWorkerRequest(worker="w", session="w-1", host_id="host-a", slots=8)
    registering.commit_mark = worker.heartbeat().commit_mark
    FakeCluster().state_machine.workers.register_worker(registering)  # to another journal it says nothing
    world.journal.close()
    restored = FakeCluster(directory=directory)
    found, expected = restored.journal.found, world.journal.committed
    show: dict[str, Callable[[], object]] = {
        "worker": partial(restored.state_machine.workers.register_worker, registering),
        "box": partial(restored.state_machine.attempts.report_box, shown),
    }
    with pytest.raises(
        JournalError, match=rf"ends at commit {found}, but commit {expected} was made, as a mark of {who} .* shows"
    ):
        show[who]()
    assert restored.journal.lost is not None
    restored.journal.close()
    with pytest.raises(JournalError, match=r"but commit \d+ was made, as .*journal\.commits shows"):
        Journal(directory)
