"""Prefetch of a loader: what the next batches need, and no farther than seconds of reading admit."""

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

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader, index_parquet
from penstock.data.formats import file_ranges
from penstock.data.loading import streaming_loader
from penstock.data.loading.upcoming_shards import ReadingRate
from penstock.data.ordering import epoch_plan

SHARDS, ROWS, BATCH = 37, 20, 10


@pytest.fixture(autouse=True)
def written(server: ShardServer) -> None:
    """A dataset of 37 shards of 20 rows and about 2,300 bytes in the folder `data`."""
    with MDSWriter(server.folder / "data", {"number": "int", "more": "bytes"}, size_limit=2_400) as writer:
        for number in range(SHARDS * ROWS):
            writer.write({"number": number, "more": bytes(92)})


@pytest.fixture
def opened(server: ShardServer, tmp_path: Path) -> Iterator[Any]:
    """Function that opens the dataset with an empty cache."""
    with ExitStack() as stack:

        def open_one(name: str = "data") -> StreamingDataset:
            number = len(list(tmp_path.glob("cache*")))
            dataset = StreamingDataset(f"{server.url}/{name}", tmp_path / f"cache{number}")
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
    """And what the next batch needs. All shards are fetched once."""
    dataset = opened()
    rows, needed = first_batch(dataset, shuffle=shuffle)
    found = settle(server, dataset)
    assert needed <= found
    assert len(found) <= 2 * BATCH
    assert shuffle or len(found) <= 2
    assert dataset.fetch_stats().ahead_shards == len(found - needed)
    assert sum(1 for _ in rows) == SHARDS * ROWS // BATCH - 1
    assert len(fetched(server)) == SHARDS
    assert set(server.requests.values()) == {1}
    stats = dataset.fetch_stats()
    assert stats.fetched_shards == SHARDS
    assert stats.fetched_bytes == sum(shard.size for table in dataset._tables for shard in table)


def test_decoding_fetches_no_more(server: ShardServer, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups are decoded ahead of need, but only those that the prefetch fetches."""
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    folder = server.folder / "groups"
    folder.mkdir()
    pq.write_table(pa.table({"number": range(400)}), folder / "one.parquet", row_group_size=10)
    index_parquet(str(folder))
    dataset = opened("groups")
    rows = iter(StreamingLoader(dataset, batch_size=BATCH, predownload=1))
    next(rows)
    until(lambda: not dataset._decoder._wanted)
    assert dataset.fetch_stats().fetched_shards == 2, "a row group and the footer"
    assert sum(1 for _ in rows) == 39


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
