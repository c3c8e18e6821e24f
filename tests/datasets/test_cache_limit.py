"""Eviction when a cache's limit is reached: which shards are evicted, in which order, and which never are."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from shard_folder import HASH, make_shards, raw_bytes, size_of_files
from shard_server import Fault, ShardServer
from waiting import until

from penstock.data.cache import eviction
from penstock.data.cache.file_locks import FileLock
from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.cache.shard_versions import ShardVersion
from penstock.data.formats.shards import Shard

SIZE = 40_000
Make = Callable[..., ShardCache]


@pytest.fixture
def make(make: Make) -> Make:
    """Caches with room for three shards."""
    return lambda **settings: make(**{"limit": 3 * SIZE, **settings})


def use(cache: ShardCache, shard: Shard) -> None:
    with cache.hold(shard) as held:
        assert held.paths[0].read_bytes() == raw_bytes(int(shard.name[6:11]), SIZE)


def there(tmp_path: Path) -> list[int]:
    """Numbers of the shards that the folder has."""
    return sorted(int(path.name[6:11]) for path in (tmp_path / "cache").glob("shard.*.mds"))


def test_the_least_recently_used_goes_first(server: ShardServer, make: Make, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 5, SIZE)
    cache = make()
    for number in (0, 1, 2, 0, 3):
        use(cache, shards[number])
        assert size_of_files(tmp_path / "cache") <= 3 * SIZE
    assert there(tmp_path) == [0, 2, 3]
    use(make(), shards[4])  # another process's use counts, and its look at the books
    assert there(tmp_path) == [0, 3, 4]


def test_held_shards_stay_beyond_the_limit(server: ShardServer, make: Make, tmp_path: Path) -> None:
    """The peer deadlocks. One warning for a cache; nothing is exceeded any more once there is something to evict."""
    shards = make_shards(server.folder, 6, SIZE)
    cache, other = make(timeout_s=30), make()
    held = [other.hold(shards[0]), cache.hold(shards[1]), cache.hold(shards[2])]
    says = rf"{tmp_path}/cache exceeds its limit of {3 * SIZE} bytes: {SIZE} more are needed"
    with pytest.warns(UserWarning, match=says) as warned:
        held.extend(cache.hold(shard) for shard in shards[3:5])
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert there(tmp_path) == [0, 1, 2, 3, 4]
    for hold in held:
        assert hold.paths[0].exists()
        hold.release()
    use(cache, shards[5])
    assert there(tmp_path) == [3, 4, 5]


def test_held_twice_is_released_twice(server: ShardServer, make: Make, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 4, SIZE)
    cache = make()
    first, second = cache.hold(shards[0]), cache.hold(shards[0])
    first.release()
    first.release()
    for shard in shards[1:]:
        use(cache, shard)
    assert 0 in there(tmp_path)
    second.release()
    use(cache, shards[1])
    use(cache, shards[2])
    use(cache, shards[3])
    assert there(tmp_path) == [1, 2, 3]


def test_under_pressure_the_user_may_release(server: ShardServer, make: Make, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 4, SIZE)
    held: list[HeldShard] = []
    cache = make(on_pressure=lambda: held.pop(0).release())
    held.extend(cache.hold(shard) for shard in shards[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(cache, shards[3])
    assert there(tmp_path) == [1, 2, 3]


def test_ahead_takes_no_more_than_fits(server: ShardServer, make: Make, tmp_path: Path) -> None:
    """Never evict shards that were prefetched before. Evicting a shard that was held and released makes space."""
    shards = make_shards(server.folder, 8, SIZE)
    cache = make(threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.fetch_ahead(shards)
        until(lambda: there(tmp_path) == [0, 1, 2])
        use(cache, shards[0])
        until(lambda: there(tmp_path) == [1, 2, 3])
        for number, shard in enumerate(shards[1:], 1):
            use(cache, shard)
            assert size_of_files(tmp_path / "cache") <= 3 * SIZE
            assert max(there(tmp_path)) < number + 4
    assert set(server.requests.values()) == {1}


def test_awaited_shard_evicts_prefetched_ones(server: ShardServer, make: Make, tmp_path: Path) -> None:
    """Evict prefetched shards of another process, too, and wait for those that are still being fetched."""
    shards = make_shards(server.folder, 4, SIZE)
    server.faults[shards[2].name] = [Fault(bytes_per_s=2 * SIZE)]
    other = make(threads=3)
    other.fetch_ahead(shards[:3])
    while len(server.requests) < 3:
        threading.Event().wait(0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(make(), shards[3])
    assert size_of_files(tmp_path / "cache") <= 3 * SIZE


def test_raw_files_go_before_packed_ones(server: ShardServer, make: Make, tmp_path: Path) -> None:
    """Inflating again is cheaper than fetching again."""
    shards = make_shards(server.folder, 4, SIZE, compression="zstd")
    cache = make(limit=3 * SIZE + SIZE // 10, keep_packed=True, validate=HASH)
    for shard in shards:
        use(cache, shard)
    assert len(list((tmp_path / "cache").glob("shard.*.mds.zstd"))) == 4
    assert there(tmp_path) == [3]
    use(cache, shards[0])
    assert set(server.requests.values()) == {1}


def test_only_copies_are_never_evicted(server: ShardServer, make: Make, tmp_path: Path) -> None:
    """Files that were there before, and that the place does not have; and files that are no shard's. The peer deletes
    the only copy."""
    shards = make_shards(server.folder, 5, SIZE)
    (tmp_path / "cache").mkdir()
    for shard in shards[:2]:
        (server.folder / shard.name).rename(tmp_path / "cache" / shard.name)
    (server.folder / shards[1].name).write_bytes(raw_bytes(1, SIZE))  # this one it has
    (tmp_path / "cache" / "shard.00099.mds").write_bytes(b"somebody's")
    cache = make()
    for shard in shards:
        use(cache, shard)
    assert there(tmp_path) == [0, 3, 4, 99]
    assert server.requests[shards[0].name] == 1, "it was asked for again"
    use(cache, shards[0])
    use(cache, shards[1])


def test_versions_cannot_evict_outside_the_folder(server: ShardServer, make: Make, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 4, SIZE)
    cache = make(limit=SIZE)
    use(cache, shards[0])
    victims = [tmp_path / "cache" / ".." / "one", tmp_path / "other"]
    for number, victim in enumerate(victims):
        victim.write_bytes(b"precious")
        version = ShardVersion(evictable=((["../one", str(victim)][number], 8),), size=SIZE)
        (tmp_path / "cache" / ".penstock" / "shards" / f"a{number}").write_bytes(version.encoded())
    for shard in shards:
        use(cache, shard)
    assert all(victim.read_bytes() == b"precious" for victim in victims)


@pytest.mark.parametrize("large", [3, 1000])
def test_limit_holds_for_caches_that_are_killed(
    server: ShardServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    """Let several processes use shards at random, and end some of them within a claim or a fetch."""
    monkeypatch.setattr(eviction, "LARGE_CACHE", large)
    shards = make_shards(server.folder, 12, SIZE)
    random = Random(large)
    write = FileLock.write
    ends_after = 0

    def killed(self: FileLock, text: bytes) -> None:
        nonlocal ends_after
        write(self, text)
        ends_after -= 1
        if not ends_after:
            raise MemoryError("ended here")

    monkeypatch.setattr(FileLock, "write", killed)
    caches = [make(limit=6 * SIZE) for _ in range(3)]
    for _ in range(80):
        number = random.randrange(len(caches))
        ends_after = random.choice([0, 0, random.randint(1, 4)])
        try:
            use(caches[number], shards[random.randrange(12)])
        except MemoryError:
            caches[number].close()
            caches[number] = make(limit=6 * SIZE)
        assert size_of_files(tmp_path / "cache") <= 6 * SIZE
    assert len(there(tmp_path)) >= 4
