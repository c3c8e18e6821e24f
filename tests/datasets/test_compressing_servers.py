"""A web server that compresses what it sends, as nginx and Apache do with gzip on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_server import ShardServer

from penstock.data import StreamingDataset, index_folder
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError

ROWS = 100_000


@pytest.fixture
def server(server: ShardServer) -> ShardServer:
    """It compresses whatever a client would take compressed."""
    server.compresses = lambda accepted: "identity" not in accepted
    return server


def test_ranges_and_whole_files_are_right(server: ShardServer, tmp_path: Path) -> None:
    table = pa.table({"i": range(ROWS), "text": ["a long text that repeats"] * ROWS})
    pq.write_table(table, server.folder / "a.parquet", row_group_size=ROWS // 4, compression=None, use_dictionary=False)
    index_folder(server.folder)
    url = server.url
    with closing(StreamingDataset(url, tmp_path / "cache", columns=["i"])) as dataset:
        assert [dataset[row]["i"] for row in range(0, ROWS, 9999)] == [*range(0, ROWS, 9999)]
        assert list((tmp_path / "cache").rglob("*.ranges")), "parts were fetched"
    data = (server.folder / "a.parquet").read_bytes()
    with closing(RemoteFolder(url, {"headers": {"X-Of-The-User": "1"}}, tries=1)) as place:
        assert place.read_range("a.parquet", 7, 77, deadline_s=20) == data[7:77]
        assert place.read("a.parquet", deadline_s=20) == data


def test_a_server_that_compresses_all_the_same_is_named(server: ShardServer, tmp_path: Path) -> None:
    (server.folder / "rows").write_bytes(bytes(1000))
    server.compresses = lambda accepted: True
    with closing(RemoteFolder(server.url, tries=1)) as place:
        for read in (
            lambda: place.read_range("rows", 0, 10, deadline_s=20),
            lambda: place.read("rows", deadline_s=20),
            lambda: place.download("rows", tmp_path / "got", expected_size=1000, deadline_s=20),
        ):
            with pytest.raises(DatasetError, match=r"rows must arrive as it was indexed, .*Content-Encoding: gzip"):
                read()
    pq.write_table(pa.table({"n": [1]}), server.folder / "a.parquet")
    index_folder(server.folder)
    with pytest.raises(DatasetError, match=r"_penstock_index\.json must arrive as it .*gzip"):
        StreamingDataset(server.url, tmp_path / "cache", timeout_s=4)
