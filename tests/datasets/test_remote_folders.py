"""Files from a web server that fails in all ways that servers do, and from places that are none."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from forked import Child
from shard_folder import raw_bytes
from shard_server import Fault, ShardServer
from waiting import until

from penstock.data.remote import folders, transfer
from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.remote_loop import RemoteLoop
from penstock.proto.errors import InvalidArgumentError, ShardCorruptError, ShardUnavailableError

SIZE = 300_000
NAME = "a folder/shard #1.mds"
DATA = raw_bytes(1, SIZE)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.01)
    file = tmp_path / "served" / NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(DATA)
    with ShardServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def place(server: ShardServer) -> Iterator[RemoteFolder]:
    place = RemoteFolder(server.url, tries=3)
    yield place
    place.close()


def fetch(place: RemoteFolder, folder: Path, *, size: int = SIZE, deadline_s: float = 30) -> bytes:
    to = folder / "landed"
    place.download(NAME, to, expected_size=size, deadline_s=deadline_s)
    return to.read_bytes()


def test_a_file_is_one_request(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    assert fetch(place, tmp_path) == DATA
    assert place.read(NAME, deadline_s=30) == DATA
    assert server.requests == {NAME: 2}
    assert place.has(NAME, SIZE, deadline_s=30)
    assert not place.has(NAME, SIZE + 1, deadline_s=30)
    assert not place.has("another", SIZE, deadline_s=30)


@pytest.mark.parametrize("fault", [Fault(500), Fault(503, (("Retry-After", "0"),)), Fault(429), Fault(cut_after=0)])
def test_what_may_pass_is_tried_again(place: RemoteFolder, server: ShardServer, tmp_path: Path, fault: Fault) -> None:
    server.faults[NAME] = [fault, fault]
    assert fetch(place, tmp_path) == DATA
    assert server.requests[NAME] == 3


@pytest.mark.parametrize(("status", "says"), [(404, "Not Found"), (403, "Forbidden")])
def test_what_will_not_pass_is_said_at_once(server: ShardServer, tmp_path: Path, status: int, says: str) -> None:
    server.faults[NAME] = [Fault(status, stays=True)]
    address = server.url.replace("http://", "http://me:a@secret1@") + "?token=secret2@x"
    place = RemoteFolder(address, tries=3)
    with pytest.raises(ShardUnavailableError, match=f"HTTP {status} {says}") as caught:
        fetch(place, tmp_path)
    place.close()
    shown = "".join(traceback.format_exception(caught.value))
    assert f"{server.url}/a%20folder/shard%20%231.mds could not be fetched after 1 try" in shown
    assert "secret" not in shown
    assert server.requests[NAME] == 1


def test_an_outage_is_waited_out(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many more failures in a row than any number of tries would be, and the log says what is being waited for."""
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_S", 0.02)
    server.faults[NAME] = [Fault(503)] * 30
    place = RemoteFolder(server.url)
    assert fetch(place, tmp_path) == DATA
    place.close()
    assert server.requests[NAME] == 31
    (record,) = caplog.records
    assert re.search(r"shard%20%231.mds could not be fetched yet: .*; retrying for \d+ s more", record.getMessage())


def test_an_outage_ends_at_the_deadline(server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_S", 1000)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 1000)
    server.faults[NAME] = [Fault(503, stays=True)]
    place = RemoteFolder(server.url)
    with pytest.raises(ShardUnavailableError, match=r"within 1 s, \d+ tries: HTTP 503"):
        fetch(place, tmp_path, deadline_s=1)
    place.close()
    assert server.requests[NAME] >= 3, "a pause is never longer than half of what is left"


def test_a_server_says_when_to_come_back(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault(503, (("Retry-After", "1"),))]
    started = time.monotonic()
    assert fetch(place, tmp_path) == DATA
    assert time.monotonic() - started >= 1
    server.faults[NAME] = [Fault(429, (("Retry-After", "1000"),))]
    with pytest.raises(ShardUnavailableError, match="within 20 s, 1 try: HTTP 429"):
        fetch(place, tmp_path, deadline_s=20)


def test_a_broken_transfer_goes_on_where_it_broke(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    """More often than there are tries, for each brings something."""
    server.faults[NAME] = [Fault(cut_after=50_000) for _ in range(5)]
    assert fetch(place, tmp_path) == DATA
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for _, asked in server.ranges]
    assert len(starts) == 5
    assert starts == sorted(set(starts))


@pytest.mark.parametrize("fault", [Fault(no_ranges=True), Fault(416)])
def test_without_ranges_it_begins_again(place: RemoteFolder, server: ShardServer, tmp_path: Path, fault: Fault) -> None:
    server.faults[NAME] = [Fault(cut_after=50_000), fault]
    assert fetch(place, tmp_path) == DATA


def test_without_validator_it_begins_again(tmp_path: Path, server: ShardServer) -> None:
    server.validators = False
    server.faults[NAME] = [Fault(cut_after=50_000)]
    place = RemoteFolder(server.url)
    assert fetch(place, tmp_path) == DATA
    assert not server.ranges
    place.close()


@pytest.mark.parametrize("any_version", [False, True])
def test_file_changed_during_read_is_never_mixed(
    place: RemoteFolder, server: ShardServer, tmp_path: Path, any_version: bool
) -> None:
    """Also if the server sends a range of the new file, though another version was asked for."""
    other = raw_bytes(2, SIZE)
    changes = Fault(cut_after=50_000, then=lambda: (server.folder / NAME).write_bytes(other))
    server.faults[NAME] = [changes, Fault(any_version=any_version)]
    assert fetch(place, tmp_path) == other
    assert len(server.ranges) == 1


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_another_size_is_said_with_both(place: RemoteFolder, server: ShardServer, tmp_path: Path, size: int) -> None:
    with pytest.raises(ShardCorruptError, match=f"mds must have {size} bytes, .* index lists, got {SIZE}"):
        fetch(place, tmp_path, size=size)
    assert server.requests[NAME] == 1


@pytest.mark.parametrize("fault", [Fault(silent_after=1000, stays=True), Fault(bytes_per_s=2000, stays=True)])
def test_no_progress_is_an_error(server: ShardServer, tmp_path: Path, fault: Fault) -> None:
    """Silence, and a server that sends a little now and then."""
    server.faults[NAME] = [fault]
    place = RemoteFolder(server.url, tries=1, stall_s=0.4)
    with pytest.raises(ShardUnavailableError, match=r"could not be fetched after 1 try: .*(in 0.4 s|[Tt]imeout)"):
        fetch(place, tmp_path)
    place.close()


def test_the_deadline_holds_though_it_progresses(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault(bytes_per_s=20_000, stays=True)]  # 15 s
    started = time.monotonic()
    with pytest.raises(ShardUnavailableError, match=r"within 0\.5 s"):
        fetch(place, tmp_path, deadline_s=0.5)
    assert time.monotonic() - started < 10


def test_closing_ends_what_moves(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.faults[NAME] = [Fault(silent_after=1000)]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fetch(place, tmp_path)
        except ShardUnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert server.moving.acquire(timeout=30)
    place.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "was closed" in str(errors[0])
    with pytest.raises(ShardUnavailableError, match="because the dataset was closed"):
        fetch(place, tmp_path)


def test_file_too_large_to_be_read_names_the_limit(place: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LARGEST_READ", SIZE - 1)
    with pytest.raises(ShardCorruptError, match=f"must have at most {SIZE - 1} bytes, got more"):
        place.read(NAME, deadline_s=30)


def test_long_outage_is_retried_to_the_end() -> None:
    failure = transfer.FailureKind("the server is away", final=False)
    assert transfer.pause_before_retry(5000, 1e6, failure) <= transfer.LONGEST_PAUSE_S


def test_forked_child_leaves_the_loop_alone(tmp_path: Path) -> None:
    """The lock of the parent's loop may be held at the fork, by a thread that the child does not have. A finalizer that
    closes the loop in the child must not wait for it."""
    loop = RemoteLoop("memory://here", {})
    loop.opening.result(20)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with loop._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(20)
        with Child(loop.close) as child:
            child.join(20)
    finally:
        done.set()
        holder.join(20)
        loop.close()


def test_no_call_after_the_interpreter_ended(server: ShardServer) -> None:
    """Though a thread that fetches tries again what was broken off. Python would tell of what never began."""
    (server.folder / "one").write_bytes(b"0123456789")
    place = RemoteFolder(server.url, tries=1)
    place.read("one", deadline_s=20)
    assert place._loop is not None
    place._loop.close()
    with pytest.raises(ShardUnavailableError, match="interpreter is exiting"):
        place.read("one", deadline_s=20)


def test_places_without_an_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", 70_000)
    fsspec.filesystem("memory").pipe_file(f"/here/{NAME}", DATA)
    place = RemoteFolder("memory://here", tries=2)
    assert fetch(place, tmp_path) == DATA
    assert place.read(NAME, deadline_s=30) == DATA
    with pytest.raises(ShardCorruptError, match=f"must have 5 bytes, .* index lists, got {SIZE}"):
        fetch(place, tmp_path, size=5)
    with pytest.raises(ShardUnavailableError, match=r"memory://here/none .*after 1 try: the file does not exist"):
        place.read("none", deadline_s=30)
    place.close()


class Plain(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A filesystem without an event loop, for one thread at a time, of which one may hang."""

    protocol = "plain"
    hangs = threading.Event()
    let_go = threading.Event()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.used = threading.Lock()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        assert self.used.acquire(blocking=False), "two threads read one connection"
        try:
            if self.hangs.is_set():
                assert self.let_go.wait(60)
            time.sleep(0.001)
            return DATA[start:end]
        finally:
            self.used.release()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": SIZE, "type": "file"}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteFolder]:
    fsspec.register_implementation("plain", Plain, clobber=True)
    monkeypatch.setattr(transfer, "PIECE", 10_000)
    place = RemoteFolder("plain://there")
    yield place
    place.close()
    Plain.let_go.set()
    Plain.hangs.clear()
    until(lambda: "penstock-place" not in {thread.name for thread in threading.enumerate()})
    Plain.let_go.clear()


def test_threads_share_no_connection(plain: RemoteFolder) -> None:
    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(lambda _: plain.read(NAME, deadline_s=30), range(12))) == {DATA}


def test_a_filesystem_that_hangs_has_a_deadline(plain: RemoteFolder, tmp_path: Path) -> None:
    Plain.hangs.set()
    started = time.monotonic()
    with pytest.raises(ShardUnavailableError, match=r"within 0\.5 s, 1 try: the deadline passed"):
        fetch(plain, tmp_path, deadline_s=0.5)
    assert time.monotonic() - started < 20
    with ThreadPoolExecutor(1) as thread:
        fetched = thread.submit(fetch, plain, tmp_path)
        until(lambda: bool(plain._moving))
        plain.close()
        with pytest.raises(ShardUnavailableError, match="was closed"):
            fetched.result(20)


def test_folders_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12")
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        place = RemoteFolder(url)
        assert place.local == tmp_path
        assert place.read("x", deadline_s=30) == b"12"
    with pytest.raises(ShardUnavailableError, match=f"{tmp_path}/y cannot be read: No such file"):
        place.read("y", deadline_s=30)


def test_places_that_are_none() -> None:
    with pytest.raises(InvalidArgumentError, match="must have a scheme that fsspec knows, got nowhere://"):
        RemoteFolder("nowhere://me:secret@host/data?token=secret")


def test_one_bucket_of_two_servers_is_two_places() -> None:
    url = "s3://bucket/train"
    first = RemoteFolder(
        url, {"endpoint_url": "http://me:secret@one:9000/?token=secret", "key": "k", "secret": "secret"}
    )
    second = RemoteFolder(url, {"client_kwargs": {"endpoint_url": "http://two:9000"}})
    assert first.identity == "s3://bucket/train at http://one:9000/"
    assert second.identity == "s3://bucket/train at http://two:9000"
    assert RemoteFolder(url, {"anon": True}).identity == url
