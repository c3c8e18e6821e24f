"""A web server that compresses what it sends, as nginx and Apache do with gzip on."""

from __future__ import annotations

import gzip
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import StreamingDataset, index_folder
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError

ROWS = 100_000


class _Handler(http.server.BaseHTTPRequestHandler):
    """Compress whatever a client would take compressed, without a length and without ranges."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data, asked = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"Vary": "Accept-Encoding"}
        status = 200
        if self.server.always or "identity" not in self.headers.get("Accept-Encoding", "gzip"):
            data = gzip.compress(data, 1)
            headers |= {"Content-Encoding": "gzip", "ETag": 'W/"1"', "Transfer-Encoding": "chunked"}
            data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        else:
            if asked:
                status, size = 206, len(data)
                begin = int(asked[1])
                data = data[begin : int(asked[2]) + 1 if asked[2] else None]
                headers["Content-Range"] = f"bytes {begin}-{begin + len(data) - 1}/{size}"
            headers |= {"ETag": '"1"', "Content-Length": str(len(data))}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    folder: Path
    always = False
    """True: compress also for a client that does not take that."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.folder = tmp_path / "served"
        server.folder.mkdir()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def test_ranges_and_whole_files_are_right(server: _Server, tmp_path: Path) -> None:
    table = pa.table({"i": range(ROWS), "text": ["a long text that repeats"] * ROWS})
    pq.write_table(table, server.folder / "a.parquet", row_group_size=ROWS // 4, compression=None, use_dictionary=False)
    index_folder(server.folder)
    url = f"http://127.0.0.1:{server.server_port}"
    with closing(StreamingDataset(url, tmp_path / "cache", columns=["i"])) as dataset:
        assert [dataset[row]["i"] for row in range(0, ROWS, 9999)] == [*range(0, ROWS, 9999)]
        assert list((tmp_path / "cache").rglob("*.ranges")), "parts were fetched"
    data = (server.folder / "a.parquet").read_bytes()
    with closing(RemoteFolder(url, {"headers": {"X-Of-The-User": "1"}}, tries=1)) as place:
        assert place.read_range("a.parquet", 7, 77, deadline_s=20) == data[7:77]
        assert place.read("a.parquet", deadline_s=20) == data


def test_a_server_that_compresses_all_the_same_is_named(server: _Server, tmp_path: Path) -> None:
    (server.folder / "rows").write_bytes(bytes(1000))
    server.always = True
    with closing(RemoteFolder(f"http://127.0.0.1:{server.server_port}", tries=1)) as place:
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
        StreamingDataset(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", timeout_s=4)
