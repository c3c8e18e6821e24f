"""Prefetch of a loader: no farther than bytes and seconds of reading admit, over all streams together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_server import ShardServer
from waiting import until

from penstock.data import LogicalShards, MDSWriter, Stream, StreamingDataset, StreamingLoader, index_parquet
from penstock.data.formats import file_ranges
from penstock.data.loading import streaming_loader
from penstock.data.loading.upcoming_shards import ReadingRate
from penstock.data.ordering import epoch_plan

SHARDS, ROWS, BATCH = 37, 20, 10
FOREVER = float("inf")


@pytest.fixture(autouse=True)
def written(server: ShardServer) -> None:
    """A dataset of 37 shards of 20 rows and about 2,300 bytes in the folder `data`, and half of it in `more`."""
    for name, count in (("data", SHARDS), ("more", SHARDS // 2)):
        with MDSWriter(server.folder / name, {"number": "int", "more": "bytes"}, size_limit=2_400) as writer:
            for number in range(count * ROWS):
                writer.write({"number": number, "more": bytes(92)})


@pytest.fixture
def opened(server: ShardServer, tmp_path: Path) -> Iterator[Any]:
    """Function that opens the dataset with an empty cache."""
    with ExitStack() as stack:

        def open_one(**settings: Any) -> StreamingDataset:
            number = len(list(tmp_path.glob("cache*")))
            streams = settings.pop("streams", None)
            if streams:
                folders = [Stream(f"{server.url}/{name}", tmp_path / f"cache{number}" / name) for name in streams]
                return stack.enter_context(closing(StreamingDataset(streams=folders, **settings)))
            dataset = StreamingDataset(f"{server.url}/data", tmp_path / f"cache{number}", **settings)
            return stack.enter_context(closing(dataset))

        yield open_one


def fetched(server: ShardServer) -> set[str]:
    return {name for name in server.requests if not name.endswith("index.json")}


def first_batch(dataset: StreamingDataset, **settings: Any) -> tuple[Any, set[str]]:
    """Return an iterator behind its first batch, and the shards that this batch needs."""
    rows = iter(StreamingLoader(dataset, batch_size=BATCH, **settings))
    numbers = next(rows)["number"].numpy()
    shards = np.searchsorted(np.cumsum(dataset.sizes[0]), numbers, side="right")
    return rows, {f"data/shard.{shard:05}.mds" for shard in shards.tolist()}


def settle(server: ShardServer, dataset: StreamingDataset) -> set[str]:
    """Return which shards were fetched, once all that are wanted are there."""
    until(lambda: not any(cache._prefetcher._queue or cache._prefetcher._moving for cache in dataset._caches))
    return fetched(server)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_fetches_what_it_needs(server: ShardServer, opened: Any, shuffle: bool) -> None:
    """The default fetches what the next batch needs too, a budget of one byte does not. All of it was fetched once."""
    dataset = opened()
    _, needed = first_batch(dataset, shuffle=shuffle)
    found = settle(server, dataset)
    assert needed <= found
    assert len(found) <= 2 * BATCH
    assert shuffle or len(found) <= 2
    server.requests.clear()
    small = opened(prefetch_bytes=1)
    rows, needed = first_batch(small, shuffle=shuffle)
    assert settle(server, small) == needed
    assert sum(1 for _ in rows) == SHARDS * ROWS // BATCH - 1
    assert len(fetched(server)) == SHARDS
    assert small.fetch_stats().fetched_shards == SHARDS


def test_bytes_bound_what_is_ahead(server: ShardServer, opened: Any) -> None:
    """At each batch, also where the epoch ends, and though the time is without limit."""
    dataset = opened(prefetch_bytes="12kb")
    loader = StreamingLoader(dataset, batch_size=BATCH, prefetch_seconds=FOREVER)
    most = 0
    for _ in range(2):
        for _ in loader:
            settle(server, dataset)
            stats = dataset.fetch_stats()
            assert stats.ahead_bytes <= 12 << 10
            most = max(most, stats.ahead_bytes)
    assert most > 9 << 10, "it keeps to a quarter of the budget or less"
    assert set(server.requests.values()) == {1}
    assert stats.fetched_bytes == sum(shard.size for table in dataset._tables for shard in table)


def test_streams_share_one_budget(server: ShardServer, opened: Any) -> None:
    """Shards are fetched in the order of need, whichever stream they are of."""
    dataset = opened(streams=["data", "more"], prefetch_bytes="12kb")
    for _ in StreamingLoader(dataset, batch_size=BATCH, interleave="samples", prefetch_seconds=FOREVER):
        settle(server, dataset)
        assert dataset.fetch_stats().ahead_bytes <= 12 << 10
        assert all(cache.stats().fetched_shards > 0 for cache in dataset._caches)


def settled_bytes(server: ShardServer, dataset: StreamingDataset, rank: tuple[int, int]) -> int:
    """Return how many bytes are ahead of need after the first batch of a box."""
    next(iter(StreamingLoader(dataset, batch_size=BATCH, prefetch_seconds=FOREVER, rank=rank)))
    settle(server, dataset)
    return dataset.fetch_stats().ahead_bytes


@pytest.mark.parametrize("boxes", [(0, 1), (1, 1)], ids=["two boxes", "one box"])
def test_boxes_of_a_host_share_one_budget(server: ShardServer, tmp_path: Path, boxes: tuple[int, int]) -> None:
    """Two boxes get a half each, and a box gets the rest when the other one ends. Workers of one box need the same."""
    with ExitStack() as stack:
        one, other = [
            stack.enter_context(closing(StreamingDataset(f"{server.url}/data", tmp_path / "c", prefetch_bytes="24kb")))
            for _ in boxes
        ]
        assert 18 << 10 < settled_bytes(server, one, (boxes[0], 2)) <= 24 << 10
        most = 24 << 10 if boxes[0] == boxes[1] else 12 << 10
        assert most * 3 // 4 < settled_bytes(server, other, (boxes[1], 2)) <= most
        assert most * 3 // 4 < settled_bytes(server, one, (boxes[0], 2)) <= most
        other.close()
        assert 18 << 10 < settled_bytes(server, one, (boxes[0], 2)) <= 24 << 10


def test_decoding_fetches_no_more(server: ShardServer, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are decoded ahead of need, but only those that the prefetch fetches."""
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    folder = server.folder / "groups"
    folder.mkdir()
    pq.write_table(pa.table({"number": range(400)}), folder / "one.parquet", row_group_size=10)
    index_parquet(str(folder))
    dataset = opened(streams=["groups"], prefetch_bytes=1)
    rows = iter(StreamingLoader(dataset, batch_size=BATCH))
    next(rows)
    until(lambda: not dataset._decoder._wanted)
    assert dataset.fetch_stats().fetched_shards == 2, "a row group and the footer"
    assert sum(1 for _ in rows) == 39


def test_pieces_keep_to_the_budget_of_bytes(server: ShardServer, opened: Any) -> None:
    dataset = opened(prefetch_bytes="12kb")
    cursor = LogicalShards([dataset], shards=1).open(0, 0, 1)
    assert next(cursor)["number"] == 0
    assert 1 < len(settle(server, dataset)) <= 6
    cursor.close()


def test_seconds_bound_what_is_ahead(server: ShardServer, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one batch in two seconds, ten seconds of reading are five batches: two or three shards."""
    now = [0.0]
    monkeypatch.setattr(streaming_loader, "ReadingRate", lambda: ReadingRate(lambda: now[0]))
    dataset = opened()
    rows = iter(StreamingLoader(dataset, batch_size=BATCH, prefetch_seconds=10))
    for number in range(1, 21):
        next(rows)
        now[0] += 2.0
        ahead = len(settle(server, dataset)) - number * BATCH / ROWS
        assert ahead <= 3
        assert ahead >= 1 or number < 2
    for _ in range(24):  # the loop is four times as fast
        next(rows)
        now[0] += 0.5
    assert len(settle(server, dataset)) - 44 * BATCH / ROWS > 5


def test_used_shards_are_closed(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open shard cannot be evicted, so that another job's full disk would stay full."""
    monkeypatch.setattr(epoch_plan, "ORDERED_AT_ONCE", 2 * BATCH)
    dataset = opened()
    for _ in StreamingLoader(dataset, batch_size=BATCH, predownload=3 * ROWS):
        assert len(dataset._open) <= 5
