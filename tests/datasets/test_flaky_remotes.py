"""The same faults of one server, read by S3's client and through a filesystem of fsspec (see test_remote_folders.py for
HTTP); and filesystems that hang."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.http import HTTPFileSystem
from shard_folder import raw_bytes
from shard_server import Fault, ShardServer

from penstock.data.remote import transfer
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import ShardUnavailableError

SIZE, PART = 300_000, 100_000
PATH, NAME = "bucket/data/shard", "shard"
DATA = raw_bytes(1, SIZE)
KINDS = ["s3", "fsspec"]


class Served(HTTPFileSystem):  # type: ignore[misc]
    """A filesystem that is unknown to Penstock: an object store on the test's server."""

    protocol = "served"

    def encode_url(self, url: str) -> Any:
        return super().encode_url(url.replace("served://", "http://"))


@pytest.fixture
def server(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> ShardServer:
    fsspec.register_implementation("served", Served, clobber=True)
    monkeypatch.setattr(transfer, "PIECE", PART)
    monkeypatch.setattr(transfer, "LARGE_PIECE", PART)
    (server.folder / PATH).parent.mkdir(parents=True)
    (server.folder / PATH).write_bytes(DATA)
    return server


@pytest.fixture
def place(server: ShardServer, request: pytest.FixtureRequest) -> Iterator[RemoteFolder]:
    if request.param == "s3":
        client = {"endpoint_url": server.url, "config_kwargs": {"retries": {"max_attempts": 0}}}
        place = RemoteFolder("s3://bucket/data", {"key": "k", "secret": "s", **client}, tries=4)
    else:
        place = RemoteFolder(f"{server.url.replace('http', 'served')}/bucket/data", tries=4)
    yield place
    place.close()


def fetch(place: RemoteFolder, folder: Path, deadline_s: float = 60.0) -> bytes:
    place.download(NAME, folder / "got", expected_size=SIZE, deadline_s=deadline_s)
    return (folder / "got").read_bytes()


@pytest.mark.parametrize("place", KINDS, indirect=True)
@pytest.mark.parametrize("fault", [Fault(503), Fault(reset_after=30_000), Fault(cut_after=30_000)])
def test_fault_that_passes_is_waited_out(
    place: RemoteFolder, server: ShardServer, tmp_path: Path, fault: Fault
) -> None:
    server.faults[PATH] = [fault, fault]
    assert fetch(place, tmp_path) == DATA
    assert not server.faults[PATH]


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_fault_that_stays_names_the_file(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.fault = lambda name: Fault(503)
    with pytest.raises(ShardUnavailableError, match=rf"/data/{NAME} could not be fetched after 4 tries: \w+"):
        fetch(place, tmp_path)


@pytest.mark.parametrize("more", [-1000, 1000])
@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_wrong_length_is_noticed(place: RemoteFolder, server: ShardServer, tmp_path: Path, more: int) -> None:
    """Parts are requested again."""
    server.faults[PATH] = [Fault(more=more)]
    assert fetch(place, tmp_path) == DATA


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_ignored_ranges_bring_the_whole_file(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.fault = lambda name: Fault(no_ranges=True)
    assert fetch(place, tmp_path) == DATA
    server.fault = lambda name: Fault(no_ranges=True, cut_after=PART + 1) if server.requests[PATH] == 1 else None
    server.requests.clear()
    assert fetch(place, tmp_path) == DATA


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_redirect_of_s3_is_an_error(place: RemoteFolder, server: ShardServer, tmp_path: Path) -> None:
    server.faults[PATH] = [Fault(307, (("Location", "/moved"),), stays=True)]
    with pytest.raises(ShardUnavailableError, match="/data/shard could not be fetched"):
        fetch(place, tmp_path)


# ---- filesystems that hang


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """A filesystem whose calls hang: "await" never returns, "block" blocks its event loop too, "open" never opens."""

    protocol = "hanging"
    cachable = False
    let_go = threading.Event()
    closed = False

    def __init__(self, how: str = "await", **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        if how == "open":
            self.let_go.wait(60)

    async def _info(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        if self.how == "block":
            self.let_go.wait(60)
        await asyncio.sleep(3600)
        return {}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        await self._info(path)
        return b""

    _find = _rm_file = _pipe_file = _put_file = _info


@pytest.fixture
def hanging() -> Iterator[type[Hanging]]:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.let_go.clear()
    yield Hanging
    Hanging.let_go.set()


@pytest.mark.parametrize("how", ["await", "block", "open"])
def test_hung_call_ends_at_its_deadline(hanging: type[Hanging], tmp_path: Path, how: str) -> None:
    """Each call, by the name of the object, with a remedy."""
    place = RemoteFolder("hanging://there", {"how": how}, stall_s=0.2)
    why = "arrived in|the deadline passed|not opened"
    (tmp_path / "file").write_bytes(b"1")
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("/shard", "fetched", lambda: fetch(place, tmp_path, 0.4)),
        ("/index", "fetched", lambda: place.read("index", deadline_s=0.4)),
        ("/shard", "read", lambda: place.read_range("shard", 0, 5, deadline_s=0.4)),
        ("/shard", "read", lambda: place.size("shard", deadline_s=0.4)),
        ("/", "listed", lambda: place.find(deadline_s=0.4)),
        ("/shard", "written", lambda: place.write("shard", b"1", deadline_s=0.4)),
        ("/shard", "written", lambda: place.upload("shard", tmp_path / "file", deadline_s=0.4)),
        ("/shard", "removed", lambda: place.remove("shard", deadline_s=0.4)),
    ]
    for name, done, call in calls:
        says = rf"hanging://there{name} could not be {done} within 0\.4 s, \d+ tr\w+: .*({why}).* raise timeout_s"
        with pytest.raises(ShardUnavailableError, match=says):
            call()
    assert not place.has("shard", 1, deadline_s=0.4)
    hanging.let_go.set()
    place.close()


def test_client_of_a_filesystem_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Azure's has it: a client, and a finalizer that needs the loop, and would complain that it has ended."""

    class Client:
        closed = False

        async def close(self) -> None:
            self.closed = True

    class WithClient(AsyncFileSystem):  # type: ignore[misc]
        cachable = False

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.service_client = Client()
            made.append((self.service_client, weakref.finalize(self, sync, self.loop, self.service_client.close)))

        async def _cat_file(self, path: str, **options: Any) -> bytes:
            return b"12"

        async def _info(self, path: str, **options: Any) -> dict[str, Any]:
            return {"name": path, "size": 2}

    made: list[tuple[Client, Any]] = []
    fsspec.register_implementation("withclient", WithClient, clobber=True)
    place = RemoteFolder("withclient://there")
    assert place.read("x", deadline_s=60) == b"12"
    place.close()
    ((client, finalizer),) = made
    assert client.closed
    assert not finalizer.alive
