"""A cache in one process: what is fetched, verified, inflated, found, and what is refused."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from shard_folder import HASH, make_shards, raw_bytes, size_of_files
from shard_server import Fault, ShardServer
from small_disk import small_disk_at
from waiting import until

from penstock.data.cache import shard_cache
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.compressed_files import COMPRESSIONS
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote import transfer
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError, ShardUnavailableError

SIZE = 40_000
Make = Callable[..., ShardCache]


def names(folder: Path) -> set[str]:
    """Return the names of the dataset's files in the folder, and of temporary ones."""
    return {path.name for path in (*folder.glob("*.*"), *folder.glob(".penstock/fetching/*"))} - {".penstock"}


def held_bytes(cache: ShardCache, shard: Shard) -> bytes:
    with cache.hold(shard) as held:
        return b"".join(path.read_bytes() for path in held.paths)


@pytest.mark.parametrize("compression", ["", *COMPRESSIONS])
@pytest.mark.parametrize("keep_packed", [False, True])
def test_what_is_held_is_the_raw_file(
    server: ShardServer, make: Make, tmp_path: Path, compression: str, keep_packed: bool
) -> None:
    shards = make_shards(server.folder, 2, SIZE, compression=compression)
    cache = make(validate=HASH, keep_packed=keep_packed)
    for _ in range(2):
        assert [held_bytes(cache, shard) for shard in shards] == [raw_bytes(n, SIZE) for n in range(2)]
    assert set(server.requests.values()) == {1}
    remote = {shard.name for shard in shards}
    if compression and keep_packed:
        remote |= {file.packed.name for shard in shards for file in shard.files if file.packed}
    assert names(tmp_path / "cache") == remote


def test_what_is_no_index_does_not_stay(server: ShardServer, make: Make, tmp_path: Path) -> None:
    (server.folder / "index.json").write_text("<html>please log in</html>")
    with pytest.raises(
        DatasetError, match=rf"{server.url}/index.json must be the index of a dataset, got .* begins with b'<html>"
    ):
        make().index()
    assert not names(tmp_path / "cache")
    (server.folder / "index.json").unlink()
    with pytest.raises(ShardUnavailableError, match=r"index.json could not be fetched after 1 try: HTTP 404"):
        make().index()
    with pytest.raises(ShardUnavailableError, match=r"must be a dataset.s folder, but has no index\.json"):
        ShardCache(None, tmp_path).index()


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_corrupt_file_is_an_error_and_not_kept(
    server: ShardServer, make: Make, tmp_path: Path, compression: str
) -> None:
    """mosaicml-streaming leaves the bad file in place, and its second run reads it silently."""
    (shard,) = make_shards(server.folder, 1, SIZE, compression=compression)
    stored = shard.files[0].packed or shard.files[0].raw
    server.faults[stored.name] = [Fault(flip=True, stays=True)]
    for run in (1, 2):
        with pytest.raises(ShardCorruptError) as caught:
            make(validate=HASH).hold(shard)
        text = str(caught.value)
        assert f"{server.url}/{stored.name}" in text
        assert str(tmp_path / "cache" / shard.name) in text
        assert f"its {HASH} hash must be {stored.hashes[HASH]}" in text
        assert server.requests[stored.name] == 2 * run
        assert not names(tmp_path / "cache")


def test_what_inflates_to_another_size_or_content(server: ShardServer, make: Make, tmp_path: Path) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE, compression="zstd")
    (file,) = shard.files
    for size, hashes, says in [
        (SIZE + 1, {}, f"must decompress to {SIZE + 1} bytes, .*got {SIZE}"),
        (SIZE - 1, {}, f"decompress to more than the {SIZE - 1} bytes"),
        (SIZE, {HASH: "0" * 16}, f"inflated is damaged: its {HASH} hash must be {'0' * 16}"),
    ]:
        bad = replace(shard, files=(replace(file, raw=StoredFile(file.raw.name, size, hashes)),))
        with pytest.raises(ShardCorruptError, match=says):
            make(validate=HASH if hashes else None).hold(bad)
        assert not names(tmp_path / "cache")


def test_validating_needs_hashes(server: ShardServer, make: Make) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    with pytest.raises(DatasetError, match=r"validate_hash='sha1' needs this hash .* got xxh64"):
        make(validate="sha1").hold(shard)
    with pytest.raises(InvalidArgumentError, match=r"validate_hash must be one of .* got 'crc'"):
        make(validate="crc")


def test_shard_cached_unverified_is_verified(server: ShardServer, make: Make) -> None:
    """Of a job that validates nothing, by one that takes what the index has."""
    (shard,) = make_shards(server.folder, 1, SIZE)
    server.faults[shard.name] = [Fault(flip=True)]
    assert held_bytes(make(validate=False), shard) != raw_bytes(0, SIZE)
    assert held_bytes(make(), shard) == raw_bytes(0, SIZE)
    assert server.requests[shard.name] == 2


def test_a_missing_shard_hurts_no_other(server: ShardServer, make: Make) -> None:
    shards = make_shards(server.folder, 2, SIZE)
    (server.folder / shards[0].name).unlink()
    cache = make()
    cache.fetch_ahead(shards)
    with pytest.raises(ShardUnavailableError, match=f"{server.url}/{shards[0].name} .*HTTP 404"):
        cache.hold(shards[0])
    assert held_bytes(cache, shards[1]) == raw_bytes(1, SIZE)


@pytest.mark.parametrize("whole", [True, False])
def test_files_of_an_earlier_run_are_used(server: ShardServer, make: Make, tmp_path: Path, whole: bool) -> None:
    """Files found in the folder are verified once, by one process, for all later ones."""
    (shard,) = make_shards(server.folder, 1, SIZE)
    left = tmp_path / "cache" / shard.name
    left.parent.mkdir()
    left.write_bytes(raw_bytes(0, SIZE) if whole else b"x" + raw_bytes(0, SIZE)[1:])
    assert held_bytes(make(validate=HASH), shard) == raw_bytes(0, SIZE)
    assert server.requests[shard.name] == (0 if whole else 1)
    time_ns = left.stat().st_mtime_ns
    left.write_bytes(bytes(SIZE))
    os.utime(left, ns=(time_ns, time_ns))
    assert held_bytes(make(validate=HASH), shard) == bytes(SIZE), (
        "it was hashed again, though size and time are the same"
    )
    left.write_bytes(bytes(SIZE))
    assert held_bytes(make(validate=HASH), shard) == raw_bytes(0, SIZE), "another time: it was not hashed again"


def test_a_folder_without_a_place_is_the_dataset(tmp_path: Path) -> None:
    plain, packed = make_shards(tmp_path, 1, SIZE), make_shards(tmp_path, 1, SIZE, compression="gz", first=1)
    cache = ShardCache(None, tmp_path, limit=1)
    assert [held_bytes(cache, shard) for shard in (*plain, *packed)] == [raw_bytes(n, SIZE) for n in range(2)]
    gone = ShardFile(StoredFile("gone", 5))
    with pytest.raises(ShardUnavailableError, match="gone is missing, and there is no remote"):
        cache.hold(replace(plain[0], files=(gone,)))
    path = tmp_path / plain[0].name
    path.write_bytes(bytes(SIZE))
    with pytest.raises(ShardCorruptError, match=f"{path} is damaged"):
        ShardCache(None, tmp_path, validate=HASH).hold(plain[0])
    path.write_bytes(b"short")
    with pytest.raises(ShardCorruptError, match=f"{path} must have {SIZE} bytes, as the dataset.s index lists, got 5"):
        ShardCache(RemoteFolder(tmp_path), tmp_path).hold(plain[0])
    assert path.exists(), "the only copy was removed"
    cache.close()


def test_local_files_are_used_in_place(tmp_path: Path) -> None:
    remote, own = tmp_path / "remote", tmp_path / "here"
    plain, packed = make_shards(remote, 1, SIZE), make_shards(remote, 1, SIZE, compression="gz", first=1)
    for validate in (None, HASH):
        cache = ShardCache(RemoteFolder(remote), own, validate=validate)
        with cache.hold(plain[0]) as held:
            assert held.paths == (remote / plain[0].name,)
        with cache.hold(packed[0]) as held:
            assert held.paths == (own / packed[0].name,)
            assert held.paths[0].read_bytes() == raw_bytes(1, SIZE)
        assert cache.index().read(1 << 20, 0) == (remote / "index.json").read_bytes()
    assert names(own) == {packed[0].name}
    assert len(list(remote.iterdir())) == 3


@pytest.mark.parametrize(("remote", "own"), [("data/remote", "data"), ("data", "data/cache")])
@pytest.mark.parametrize("validate", [None, HASH])
def test_remote_files_stay_beside_a_nested_cache(tmp_path: Path, remote: str, own: str, validate: str | None) -> None:
    """A packed file of the remote must not be removed when it was unpacked, nor when it is corrupt."""
    shards = make_shards(tmp_path / remote, 2, SIZE, compression="gz")
    paths = [tmp_path / remote / file.packed.name for shard in shards for file in shard.files if file.packed]
    before = [path.read_bytes() for path in paths]
    cache = ShardCache(RemoteFolder(tmp_path / remote), tmp_path / own, validate=validate)
    assert [held_bytes(cache, shard) for shard in shards] == [raw_bytes(n, SIZE) for n in range(2)]
    cache.close()
    assert [path.read_bytes() for path in paths] == before
    raw = tmp_path / own / shards[0].name
    raw.unlink()
    damaged = before[0][:-9] + bytes([before[0][-9] ^ 1]) + before[0][-8:]
    paths[0].write_bytes(damaged)
    again = ShardCache(RemoteFolder(tmp_path / remote), tmp_path / own, validate=validate)
    with pytest.raises(ShardCorruptError, match=paths[0].name):
        again.hold(shards[0])
    assert paths[0].read_bytes() == damaged, "the only copy was removed"
    paths[0].write_bytes(before[0])
    raw.write_bytes(b"short")
    assert held_bytes(again, shards[0]) == raw_bytes(0, SIZE), "a bad one of the cache's own goes"
    again.close()


def test_a_folder_holds_one_dataset(server: ShardServer, make: Make, tmp_path: Path) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    make().hold(shard)
    cache = ShardCache(RemoteFolder("memory://another"), tmp_path / "cache")
    with pytest.raises(DatasetError, match=rf"must hold files of memory://another, got files of {server.url}"):
        cache.hold(shard)


def test_a_folder_that_cannot_be_written(tmp_path: Path, server: ShardServer) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ShardUnavailableError, match=r"file/cache cannot be written: Not a directory. Make space, or give another"
    ):
        ShardCache(RemoteFolder(server.url), tmp_path / "file" / "cache").hold(shard)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with room for three shards."""
    with small_disk_at(tmp_path / "disk", 4 * SIZE) as disk:
        yield disk


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_a_full_disk_is_named_and_others_go_on(server: ShardServer, small_disk: Path, compression: str) -> None:
    big, small = (
        make_shards(server.folder, 1, 10 * SIZE, compression=compression)[0],
        make_shards(server.folder, 1, SIZE, compression=compression, first=1)[0],
    )
    cache = ShardCache(RemoteFolder(server.url), small_disk)
    says = rf"{server.url}/{big.name}.* {small_disk}/.*: No space left on device; it needs {{}} bytes, \d+ are free"
    needed = big.files[0].packed.size if big.files[0].packed else big.size
    with pytest.raises(ShardUnavailableError, match=says.format(needed)):
        cache.hold(big)
    assert not names(small_disk)
    assert held_bytes(cache, small) == raw_bytes(1, SIZE)
    cache.close()


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_full_disk_evicts_what_is_unused(server: ShardServer, small_disk: Path, compression: str) -> None:
    """Read more than the disk holds, without a limit; another job's shard stays, and so does one that is read now."""
    shards = make_shards(server.folder, 8, SIZE, compression=compression)
    cache, other = (ShardCache(RemoteFolder(server.url), small_disk) for _ in range(2))
    with other.hold(shards[0]) as theirs:
        for number, shard in enumerate(shards):
            assert held_bytes(cache, shard) == raw_bytes(number, SIZE)
        assert theirs.paths[0].read_bytes() == raw_bytes(0, SIZE)
        assert set(server.requests.values()) == {1}, "there must be space before it is fetched"
    assert not list((small_disk / ".penstock" / "fetching").iterdir())
    cache.close()
    other.close()


def test_full_disk_names_its_remedy_if_all_is_held(
    server: ShardServer, small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "FULL_WAIT_S", 0.0)
    shards = make_shards(server.folder, 6, SIZE)
    cache = ShardCache(RemoteFolder(server.url), small_disk)
    held = [cache.hold(shard) for shard in shards[:3]]
    with pytest.raises(ShardUnavailableError, match=rf"it needs {SIZE} bytes, \d+ are free. Free space .* folder"):
        cache.hold(shards[3])
    assert [hold.paths[0].read_bytes() for hold in held] == [raw_bytes(number, SIZE) for number in range(3)]
    assert not list((small_disk / ".penstock" / "fetching").iterdir())
    assert not caplog.records
    monkeypatch.setattr(shard_cache, "FULL_WAIT_S", 600.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(cache.hold, shards[5])
        until(lambda: server.requests[shards[5].name] > 0)
        for hold in held:  # as another job would
            hold.release()
        with waiting.result(60) as found:
            assert found.paths[0].read_bytes() == raw_bytes(5, SIZE)
    cache.fetch_ahead(shards[3:5])  # in threads, which evict too
    until(lambda: cache.stats().ahead_bytes == 2 * SIZE)
    assert "is full: shards that no process uses are evicted" in caplog.text
    cache.close()


@pytest.mark.parametrize("fits", [True, False])
def test_quota_evicts_and_tries_again(
    server: ShardServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A quota does not show in the bytes that are free: only a write tells of it."""
    quota = 2 * SIZE + SIZE // 2 if fits else SIZE // 2
    write = transfer.DownloadTarget.write

    def limited(self: transfer.DownloadTarget, data: bytes) -> int:
        if size_of_files(tmp_path / "cache") + len(data) > quota:
            raise transfer.unwritable(refused, str(tmp_path / "cache"), SIZE, "it") from refused
        return write(self, data)

    refused = OSError(errno.EDQUOT, "Disk quota exceeded")
    monkeypatch.setattr(transfer.DownloadTarget, "write", limited)
    monkeypatch.setattr(shard_cache, "FULL_WAIT_S", 0.0)
    shards = make_shards(server.folder, 4, SIZE)
    cache = make()
    if fits:
        assert [held_bytes(cache, shard) for shard in shards] == [raw_bytes(number, SIZE) for number in range(4)]
        assert server.requests[shards[2].name] == 2
        return
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / shards[1].name).write_bytes(raw_bytes(1, SIZE))
    held_bytes(cache, shards[1])
    with pytest.raises(ShardUnavailableError, match=f"Disk quota exceeded; it needs {SIZE} .* were evicted before"):
        cache.hold(shards[0])
    assert server.requests[shards[0].name] == 2


def test_closing_in_the_middle_of_transfers(server: ShardServer, make: Make, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 3, SIZE)
    for shard in shards:
        server.faults[shard.name] = [Fault(silent_after=100, stays=True)]
    before = set(threading.enumerate())
    cache = make(threads=2)
    cache.fetch_ahead(shards)
    for _ in range(2):
        assert server.moving.acquire(timeout=30)
    ours = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("penstock-")]
    assert len(ours) == 3
    started = time.monotonic()
    cache.close()
    assert time.monotonic() - started < 20  # a second, if nothing else runs; the server is silent for 60
    assert not any(thread.is_alive() for thread in ours)
    assert not names(tmp_path / "cache")
    with pytest.raises(ShardUnavailableError, match="because the dataset was closed"):
        cache.hold(shards[0])
    gc.collect()  # what complains of being unclosed does it now


def test_wait_for_another_process_has_a_deadline(
    server: ShardServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    server.faults[shard.name] = [Fault(silent_after=100, stays=True)]
    make(threads=1).fetch_ahead([shard])
    assert server.moving.acquire(timeout=30)
    with pytest.raises(ShardUnavailableError, match=rf"was not available .*held by process {os.getpid()}\."):
        make(timeout_s=0.3).hold(shard)


def test_cache_is_pickled_as_its_settings(server: ShardServer, make: Make) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    cache = make(validate=HASH, limit=5 * SIZE)
    with cache.hold(shard):
        copy = pickle.loads(pickle.dumps(cache))
    assert held_bytes(copy, shard) == raw_bytes(0, SIZE)
    assert server.requests[shard.name] == 1
    copy.close()
