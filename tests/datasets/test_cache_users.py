"""Cache folders that another user has made, or can write to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shard_folder import make_shards, raw_bytes
from shard_server import ShardServer

from penstock.data import MDSWriter, Stream, StreamingDataset
from penstock.data.cache.index_watch import RemoteIndex
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.compressed_files import pack
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError

STRANGER = 12_345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
Hold = Callable[..., None]


@pytest.fixture
def hold(server: ShardServer, tmp_path: Path) -> Hold:
    """Fetches a shard into the folder "cache"."""
    (shard,) = make_shards(server.folder, 1, 1000)

    def hold(group: int | None = None, limit: int | None = None) -> None:
        remote = RemoteFolder(server.url, tries=1)
        cache = ShardCache(remote, tmp_path / "cache", group=group, limit=limit, timeout_s=10)
        try:
            with cache.hold(shard):
                pass
        finally:
            cache.close()

    return hold


def test_file_in_place_of_a_folder_is_named(hold: Hold, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".penstock").touch()
    with pytest.raises(DatasetError, match=r"\.penstock must be a folder, got a file\. Remove it"):
        hold()


@as_root
@pytest.mark.parametrize("path", ["cache", "cache/.penstock", "cache/.penstock/shards"])
def test_other_users_folder_needs_a_group(hold: Hold, tmp_path: Path, path: str) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(
        DatasetError,
        match=rf"cache must be safe from other users, but {folder} is owned by user {STRANGER} with mode 755",
    ):
        hold()
    with pytest.raises(DatasetError, match=r"Give a folder of your own, or cache_group=\.\.\. for one that a group"):
        hold(STRANGER + 1)
    assert not list(tmp_path.glob("cache/shard*"))
    hold(STRANGER)


@contextlib.contextmanager
def user_of(user: int, group: int) -> Iterator[None]:
    """Let this process be another user, in a group."""
    groups = os.getgroups()
    os.setgroups([group])
    os.setresgid(user, user, 0)
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


@as_root
def test_users_of_a_group_share_a_folder(bucket: str) -> None:
    """Each reads and evicts what the other fetched; a user outside is refused."""
    with MDSWriter(bucket, {"n": "int"}, size_limit=200, compression="zstd") as writer:
        for number in range(100):
            writer.write({"n": number})
    place = RemoteFolder(bucket)
    for name in place.names(deadline_s=9):
        place.write(f"deep/{name}", place.read(name, deadline_s=9), deadline_s=9)
    index = place.read("index.json", deadline_s=9).replace(b'"shard.', b'"deep/shard.')
    place.write("index.json", index, deadline_s=9)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)

        def read(user: int, group: int, numbers: range, limit: int = 10_000) -> set[int]:
            """Read samples as a user. Return the users who own files of shards then."""
            stream = Stream(bucket, f"{folder}/cache", keep_zip=True)
            with (
                user_of(user, group),
                contextlib.closing(
                    StreamingDataset(streams=[stream], cache_limit=limit, cache_group=STRANGER)
                ) as dataset,
            ):
                assert [dataset[number]["n"] for number in numbers] == list(numbers)
            return {path.stat().st_uid for path in Path(folder, "cache/deep").iterdir()}

        assert read(1001, STRANGER, range(50)) == {1001}
        assert {path.suffix for path in Path(folder, "cache/deep").iterdir()} == {".mds", ".zstd"}
        assert read(1002, STRANGER, range(50)) == {1001}
        assert read(1002, STRANGER, range(100)) == {1001, 1002}
        assert read(1001, STRANGER, range(50, 100)) == {1001, 1002}
        assert read(1002, STRANGER, range(50), limit=500) == {1002}
        assert read(1001, STRANGER, range(50, 100), limit=500) == {1001}
        with pytest.raises(ShardUnavailableError, match="Permission denied"):
            read(1003, 1003, range(1))


@pytest.mark.parametrize("name", [".penstock", ".penstock/shards", ".penstock/fetching"])
def test_books_that_are_a_link_are_refused(hold: Hold, tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").mkdir()
    path = tmp_path / "cache" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(DatasetError, match=rf"{path} is a link to .*/victim"):
        hold()
    assert not any((tmp_path / "victim").iterdir())


@pytest.mark.parametrize("name", ["remote", "shards/shard.00000.mds", "fetching/shard.00000.mds"])
def test_a_lock_that_is_a_link_cuts_nothing(hold: Hold, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    path = tmp_path / "cache" / ".penstock" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(ShardUnavailableError, match=rf"the path must not be a symbolic link \(to {victim}\)"):
        hold()
    path.unlink()
    path.hardlink_to(victim)
    with pytest.raises(ShardUnavailableError, match=r"the file must not have a second name"):
        hold()
    assert victim.read_text() == "years of work"


STATE_FILES = ["index.json", "remote", "eviction", "shards/other", "fetching/other", "fetching/shard.00000.mds!0raw"]


@pytest.mark.parametrize("name", STATE_FILES)
@pytest.mark.parametrize("kind", ["fifo", "folder", "holes", "deep"])
def test_strange_state_files_are_not_awaited(
    hold: Hold, server: ShardServer, tmp_path: Path, name: str, kind: str
) -> None:
    """Another user may have put them there. Each is passed over, or named in an error."""
    path = tmp_path / "cache" / ".penstock" / name
    path.parent.mkdir(parents=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "holes":
            path.touch()
            os.truncate(path, 1 << 40)
        case "deep":
            path.write_text("[" * 100_000)
    with contextlib.suppress(DatasetError, ShardUnavailableError):
        hold(limit=2000)
    with contextlib.suppress(DatasetError, OSError):
        RemoteIndex(RemoteFolder(server.url, tries=1), tmp_path / "cache", ".penstock/index.json").check()


def test_links_below_a_cache_are_not_followed(server: ShardServer, tmp_path: Path) -> None:
    """A name that another user makes in a cache's folder may be that of a folder of shards."""
    (shard,) = make_shards(server.folder, 1, 1000)
    (server.folder / "train").mkdir()
    (server.folder / shard.name).rename(server.folder / "train" / shard.name)
    raw = replace(shard.files[0].raw, name=f"train/{shard.name}")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / shard.name).write_text("years of work")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "train").symlink_to(victim)
    cache = ShardCache(RemoteFolder(server.url, tries=1), tmp_path / "cache", limit=1000, timeout_s=10)
    with pytest.raises(ShardUnavailableError, match=r"must be a folder, got a link or a file: '.*train'"):
        cache.hold(replace(shard, files=(replace(shard.files[0], raw=raw),)))
    cache.close()
    assert (victim / shard.name).read_text() == "years of work"
    assert len([*victim.iterdir()]) == 1


@pytest.mark.parametrize("name", ["shards", "fetching", "prefetched", ""])
def test_state_folder_swapped_for_a_link(server: ShardServer, tmp_path: Path, name: str) -> None:
    """Another user may be able to do that, and has its own idea of where our files lie."""
    shards = make_shards(server.folder, 3, 1000)
    victim = tmp_path / "victim"
    for folder in ("", "shards", "fetching"):
        (victim / folder).mkdir()
        for file in (shards[1].name, f"{shards[1].name}!0raw", "index.json"):
            (victim / folder / file).write_text("years of work")
    before = {path: path.stat().st_mtime_ns for path in victim.rglob("*") if path.is_file()}
    cache = ShardCache(RemoteFolder(server.url, tries=1), tmp_path / "cache", limit=2000, timeout_s=10)
    with cache.hold(shards[0]):
        pass
    swapped = tmp_path / "cache" / ".penstock" / name
    swapped.rename(tmp_path / "away")
    swapped.symlink_to(victim)
    with contextlib.suppress(ShardUnavailableError):
        for shard in (shards[1], shards[2], shards[1]):
            with cache.hold(shard):
                pass
    cache.close()
    assert {path: path.stat().st_mtime_ns for path in victim.rglob("*") if path.is_file()} == before


@as_root
def test_link_of_another_user_in_tmp_is_refused(hold: Hold, tmp_path: Path) -> None:
    """Somebody expected the cache there, and made the link first."""
    (tmp_path / "victim").mkdir()
    tmp_path.chmod(0o1777)
    (tmp_path / "cache").symlink_to(tmp_path / "victim")
    os.lchown(tmp_path / "cache", STRANGER, STRANGER)
    with pytest.raises(ShardUnavailableError, match="the path must not contain a link of another user"):
        hold()
    assert not any((tmp_path / "victim").iterdir())
    os.lchown(tmp_path / "cache", os.getuid(), os.getgid())
    hold()


@as_root
def test_packed_link_of_another_user_is_dropped(server: ShardServer, tmp_path: Path) -> None:
    """The target of the link was unpacked into a file that everybody can read."""
    (shard,) = make_shards(server.folder, 1, 1000, compression="zstd", hashes=False)
    packed = shard.files[0].packed
    assert packed is not None
    secret = tmp_path / "secret"
    secret.write_bytes(pack(raw_bytes(1, 1000), "zstd"))
    assert secret.stat().st_size == packed.size
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / packed.name).symlink_to(secret)
    os.lchown(tmp_path / "cache" / packed.name, STRANGER, STRANGER)
    cache = ShardCache(RemoteFolder(server.url, tries=1), tmp_path / "cache", timeout_s=10)
    with cache.hold(shard) as held:
        assert held.paths[0].read_bytes() == raw_bytes(0, 1000)
    cache.close()


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cache_group must be a group of this machine, got 'no-such'"):
        StreamingDataset(tmp_path, tmp_path / "cache", cache_group="no-such")
