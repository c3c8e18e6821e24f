"""Cache folders that another user has made, or can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_folder import make_shards
from shard_server import ShardServer

from penstock.data import StreamingDataset
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError

STRANGER = 12_345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
Hold = Callable[..., None]


@pytest.fixture
def hold(server: ShardServer, tmp_path: Path) -> Hold:
    """Fetches a shard into the folder "cache"."""
    (shard,) = make_shards(server.folder, 1, 1000)

    def hold(group: int | None = None) -> None:
        cache = ShardCache(RemoteFolder(server.url, tries=1), tmp_path / "cache", group=group, timeout_s=10)
        try:
            with cache.hold(shard):
                pass
        finally:
            cache.close()

    return hold


@as_root
@pytest.mark.parametrize("path", ["cache", "cache/.penstock", "cache/.penstock/shards"])
def test_other_users_folder_needs_a_group(hold: Hold, tmp_path: Path, path: str) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(
        DatasetError,
        match=rf"the cache folder .*/cache is not safe to use: {folder} is owned by user {STRANGER} with mode 755",
    ):
        hold()
    with pytest.raises(DatasetError, match=r"Give a folder of your own, or cache_group=\.\.\. for one that a group"):
        hold(STRANGER + 1)
    assert not list(tmp_path.glob("cache/shard*"))
    hold(STRANGER)


@as_root
def test_group_members_can_write_shared_files(hold: Hold, tmp_path: Path) -> None:
    hold(STRANGER)
    folders = [tmp_path / "cache", *(path for path in (tmp_path / "cache" / ".penstock").rglob("*") if path.is_dir())]
    assert {(path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) for path in folders} == {(STRANGER, 0o2775)}
    for path in (tmp_path / "cache" / ".penstock" / "shards").iterdir():
        assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (STRANGER, 0o664)


def test_our_own_books_are_closed_to_others(hold: Hold, tmp_path: Path) -> None:
    books = tmp_path / "cache" / ".penstock"
    books.mkdir(parents=True)
    books.chmod(0o777)
    hold()
    assert stat.S_IMODE(books.stat().st_mode) == 0o755


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
    with pytest.raises(ShardUnavailableError, match=rf"it is a symbolic link \(to {victim}\), which is not followed"):
        hold()
    assert victim.read_text() == "years of work"


def test_fifo_instead_of_a_file_is_not_awaited(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "index.json")
    with pytest.raises(ShardUnavailableError, match=r"index\.json: it is not a regular file"):
        StreamingDataset(local=tmp_path / "data")


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cache_group must be a group of this machine, got 'no-such'"):
        StreamingDataset(tmp_path, tmp_path / "cache", cache_group="no-such")
