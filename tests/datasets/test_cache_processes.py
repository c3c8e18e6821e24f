"""Use of one folder by several processes: each file is fetched once, whichever process dies, and what a killed one
leaves does not block the others."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Child, join_all
from shard_folder import HASH, make_shards, raw_bytes, size_of_files
from shard_server import Fault, ShardServer
from waiting import until

from penstock.data.cache import eviction
from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import ShardCorruptError

SIZE = 40_000


@contextlib.contextmanager
def cache_of(server: ShardServer, tmp_path: Path, **settings: object) -> Iterator[ShardCache]:
    cache = ShardCache(RemoteFolder(server.url, tries=3), tmp_path / "cache", **settings)  # type: ignore[arg-type]
    try:
        yield cache
    finally:
        cache.close()


def check(cache: ShardCache, shard: Shard) -> None:
    with cache.hold(shard) as held:
        assert held.paths[0].read_bytes() == raw_bytes(int(shard.name[6:11]), SIZE)


def assert_clean(folder: Path) -> None:
    """No temporary file, and no lock that anybody has."""
    assert not list((folder / ".penstock" / "fetching").iterdir())
    assert not list((folder / ".penstock" / "prefetched").iterdir())
    for path in (folder / ".penstock" / "shards").iterdir():
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_each_file_is_fetched_once(server: ShardServer, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 8, SIZE, compression="zstd")

    def work() -> None:
        with cache_of(server, tmp_path, validate=HASH, threads=2) as cache:
            cache.index()
            cache.fetch_ahead(shards)
            for shard in random.sample(shards, len(shards)):
                check(cache, shard)

    join_all(*[work] * 4)
    assert set(server.requests.values()) == {1}
    assert len(server.requests) == 9
    assert_clean(tmp_path / "cache")


def test_killed_fetcher_is_taken_over(server: ShardServer, tmp_path: Path) -> None:
    (shard,) = make_shards(server.folder, 1, SIZE)
    server.faults[shard.name] = [Fault(silent_after=1000)]

    def work() -> None:
        with cache_of(server, tmp_path, limit=10 * SIZE) as cache:
            check(cache, shard)

    with Child(work) as first, contextlib.ExitStack() as stack:
        assert server.moving.acquire(timeout=30)
        second = stack.enter_context(Child(work))
        select.select([], [], [], 0.1)  # for it to be waiting; the test holds as well if it is not
        assert server.requests[shard.name] == 1
        first.kill()
        second.join()
    assert server.requests[shard.name] == 2
    assert_clean(tmp_path / "cache")


@pytest.mark.parametrize("removals", [0, 1])
def test_killed_in_the_middle_of_an_eviction(server: ShardServer, tmp_path: Path, removals: int) -> None:
    """Kill a process before it removes the file and after it, with the version file still there."""
    shards = make_shards(server.folder, 3, SIZE)
    arrived = tmp_path / "arrived"

    def work() -> None:
        unlink = os.unlink
        count = 0

        def stop(path: str, *, dir_fd: int) -> None:
            nonlocal count
            if count == removals:
                arrived.touch()
                select.select([], [], [])
            count += 1
            unlink(path, dir_fd=dir_fd)

        with cache_of(server, tmp_path, limit=2 * SIZE) as cache:
            check(cache, shards[0])
            check(cache, shards[1])
            eviction.os.unlink = stop  # type: ignore[attr-defined]
            cache.hold(shards[2])

    with Child(work) as child:
        until(arrived.exists)
        child.kill()
    assert (tmp_path / "cache" / shards[0].name).exists() == (not removals)
    with cache_of(server, tmp_path, limit=2 * SIZE) as cache:
        for shard in shards:
            check(cache, shard)
            assert size_of_files(tmp_path / "cache") <= 2 * SIZE
    assert_clean(tmp_path / "cache")


def test_child_does_not_release_parents_shards(server: ShardServer, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 4, SIZE)
    arrived, leave = tmp_path / "arrived", tmp_path / "leave"
    with cache_of(server, tmp_path, limit=2 * SIZE) as cache:
        held = cache.hold(shards[0])
        other = cache.hold(shards[1])

        def work() -> None:
            held.release()
            other.release()
            with pytest.warns(UserWarning, match="exceeds its limit"):  # for the parent still holds both
                check(cache, shards[2])
            cache.hold(shards[0])
            arrived.touch()
            until(leave.exists)
            cache.close()

        with Child(work) as child:
            until(arrived.exists)
            assert held.paths[0].exists()
            assert other.paths[0].exists()
            held.release()
            other.release()
            check(cache, shards[3])
            assert held.paths[0].exists(), "the child holds it"
            leave.touch()
            child.join()
        check(cache, shards[1])
        check(cache, shards[2])
        assert not held.paths[0].exists()
    assert_clean(tmp_path / "cache")


def test_child_keeps_no_lock_of_its_dead_parent(server: ShardServer, tmp_path: Path) -> None:
    shards = make_shards(server.folder, 2, SIZE)
    orphan = tmp_path / "orphan"

    def parent() -> None:
        with cache_of(server, tmp_path, limit=SIZE) as cache:
            cache.hold(shards[0])
            if not os.fork():
                orphan.write_text(str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            time.sleep(60)

    with Child(parent) as child:
        until(lambda: orphan.exists() and bool(orphan.read_text()))
        child.kill()
    try:
        with cache_of(server, tmp_path, limit=SIZE) as cache:
            check(cache, shards[1])
            assert size_of_files(tmp_path / "cache") == SIZE
    finally:
        os.kill(int(orphan.read_text()), 9)


def kill_at_call(calls: int) -> None:
    """Kill this process at one of its next calls that change a folder."""
    left = calls

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def changed(*given: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return changed

    for name in ("replace", "rename", "unlink", "open", "ftruncate"):
        setattr(os, name, counted(getattr(os, name)))


def test_kills_beside_another_job(server: ShardServer, tmp_path: Path) -> None:
    """One job after the other is killed at any of its calls; the one beside them has every shard, within the limit."""
    shards = make_shards(server.folder, 10, SIZE, compression="zstd")
    ended = tmp_path / "ended"

    def pass_over(seed: int) -> None:
        with cache_of(server, tmp_path, limit=9 * SIZE, threads=2) as cache:
            order = random.Random(seed).sample(shards, len(shards))
            for at, shard in enumerate(order):
                cache.fetch_ahead(order[at : at + 2])
                check(cache, shard)

    def whole() -> None:
        seed = 0
        while not ended.exists():
            seed += 1
            pass_over(seed)

    def killed(calls: int) -> None:
        kill_at_call(calls)
        pass_over(-calls)

    kills = 0
    with Child(whole) as beside:
        for calls in range(1, 200, 25):
            child = Child(functools.partial(killed, calls))
            try:
                child.join()
            except AssertionError as error:
                assert "ended with 9" in str(error)  # noqa: PT017 - the other way to end is a success
                kills += 1
            assert size_of_files(tmp_path / "cache") <= 9 * SIZE
        ended.touch()
        beside.join()
    assert kills > 2
    pass_over(1000)
    assert_clean(tmp_path / "cache")


def held_at_last(cache: ShardCache, shard: Shard) -> HeldShard:
    """Though the server may send it corrupt twice in a row."""
    while True:
        with contextlib.suppress(ShardCorruptError):
            return cache.hold(shard)


def test_whatever_is_asked_and_fails(server: ShardServer, tmp_path: Path) -> None:
    """Holds, releases and lists at random in three processes, a server that fails at random, a small limit."""
    shards = make_shards(server.folder, 10, SIZE, compression="zstd")
    at_fault = random.Random(1)
    server.fault = lambda name: at_fault.choice(
        [None, None, None, Fault(500), Fault(503), Fault(cut_after=at_fault.randrange(SIZE)), Fault(flip=True)]
    )
    # Just above what three need that hold two each, with what is packed (a little more than half) beside what is raw.
    limit = 10 * SIZE

    def work(number: int) -> None:
        rng = random.Random(1000 + number)
        for _ in range(2):
            place = RemoteFolder(server.url, tries=20)
            cache = ShardCache(place, tmp_path / "cache", validate=HASH, limit=limit, threads=2)
            held: list[tuple[Shard, HeldShard]] = []
            for _ in range(25):
                match rng.randrange(4):
                    case 0:
                        cache.fetch_ahead(rng.sample(shards, rng.randrange(4)))
                    case 1 if held:
                        held.pop(rng.randrange(len(held)))[1].release()
                    case _ if len(held) < 2:
                        shard = rng.choice(shards)
                        held.append((shard, held_at_last(cache, shard)))
                for shard, hold in held:
                    assert hold.paths[0].read_bytes() == raw_bytes(int(shard.name[6:11]), SIZE)
            cache.close()

    join_all(*(functools.partial(work, number) for number in range(3)))
    assert_clean(tmp_path / "cache")
    assert size_of_files(tmp_path / "cache") <= limit
    kept = list((tmp_path / "cache").glob("shard.*.mds"))
    assert kept
    for path in kept:
        assert path.read_bytes() == raw_bytes(int(path.name[6:11]), SIZE)
