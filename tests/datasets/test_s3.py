"""A bucket of a real S3 server, in a process of its own."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from forked import join_all
from s3_server import Fault as S3Fault
from s3_server import S3Server
from s3fs import S3FileSystem
from shard_folder import HASH, make_shards, raw_bytes
from shard_server import ShardServer

from penstock.data import MDSWriter, StreamingDataset, index_folder, merge_index
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.remote import folders, transfer
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardCorruptError, ShardUnavailableError

SIZE = 40_000
NAME = "shard.00000.mds"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def options(server: S3Server) -> dict[str, Any]:
    return server.options


@pytest.fixture(scope="module")
def filesystem(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A bucket with shards in the folder `data`."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **options)
    fs.bucket = f"penstock-{os.getpid()}-{time.monotonic_ns()}"
    fs.mkdir(fs.bucket)
    folder = tmp_path_factory.mktemp("served")
    make_shards(folder, 2, SIZE, compression="zstd", first=1)
    make_shards(folder, 1, SIZE)
    fs.put(f"{folder}/", f"{fs.bucket}/data/", recursive=True)
    return fs


@pytest.fixture
def bucket(filesystem: Any) -> Iterator[Any]:
    """The bucket, whose first shard a test may replace."""
    yield filesystem
    filesystem.pipe_file(f"{filesystem.bucket}/data/{NAME}", raw_bytes(0, SIZE))


def test_a_dataset_is_written_into_a_bucket(bucket: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Write a dataset in parts and merge them in the bucket; then write it again while it is read, without hashes."""
    address = f"s3://{bucket.bucket}/written"
    for part in range(2):
        with MDSWriter(f"{address}/{part}", {"n": "int"}, size_limit=200, storage_options=options) as writer:
            for number in range(100 * part, 100 * part + 50):
                writer.write({"n": number})
    merge_index(address, storage_options=options)
    with closing(StreamingDataset(address, tmp_path / "cache", storage_options=options)) as dataset:
        assert [dataset[at]["n"] for at in range(50)] == list(range(50))
        merge_index(address, storage_options=options)
        age = RemoteFolder(address, options).version("index.json", deadline_s=9)
        assert age is not None
        assert "LastModified" in age
        (tmp_path / "cache/.penstock/index.json").write_text("LastModified: before")  # S3 counts in seconds
        with pytest.raises(DatasetError, match="was written again since it was fetched into"):
            dataset[99]


def test_a_dataset_in_a_bucket(bucket: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Read also from a forked child, which cannot use its parent's connections."""
    shards = make_shards(tmp_path / "served", 1, SIZE)
    shards += make_shards(tmp_path / "served", 2, SIZE, compression="zstd", first=1)
    cache = ShardCache(RemoteFolder(f"s3://{bucket.bucket}/data", options), tmp_path / "cache", validate=HASH)

    def check(numbers: tuple[int, ...]) -> None:
        for number in numbers:
            with cache.hold(shards[number]) as held:
                assert held.paths[0].read_bytes() == raw_bytes(number, SIZE)

    assert b"version" in cache.index().read(1 << 20, 0)
    check((0, 1))
    join_all(lambda: check((0, 1, 2)))
    check((2,))
    cache.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", 9_000)
    monkeypatch.setattr(transfer, "LARGE_PIECE", 9_000)


@pytest.mark.usefixtures("small_pieces")
def test_file_replaced_during_read_is_read_again(
    bucket: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace a file by one of the same size, after its first piece was read."""
    monkeypatch.setattr(folders, "PARALLEL", 2)
    place = RemoteFolder(f"s3://{bucket.bucket}/data/", options, tries=2)
    real = RemoteFolder._started
    requests = 0

    def started(self: RemoteFolder, loop: Any, work: Any) -> Any:
        nonlocal requests
        requests += 1
        if requests == 3:
            bucket.pipe_file(f"{bucket.bucket}/data/{NAME}", raw_bytes(7, SIZE))
        return real(self, loop, work)

    monkeypatch.setattr(RemoteFolder, "_started", started)
    place.download(NAME, tmp_path / "got", expected_size=SIZE, deadline_s=30)
    assert (tmp_path / "got").read_bytes() == raw_bytes(7, SIZE)
    assert requests > SIZE // 9_000 + 2
    place.close()


@pytest.mark.usefixtures("small_pieces")
def test_failed_piece_is_requested_again(
    bucket: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail one of the pieces that are requested at the same time; what arrived before it is not read again."""
    read: list[int] = []
    real = S3FileSystem._cat_file

    async def piece(fs: Any, path: str, start: int, end: int) -> Any:
        read.append(start)
        if start == 18_000 and read.count(start) == 1:
            raise TimeoutError("the connection was silent")
        return await real(fs, path, start=start, end=end)

    monkeypatch.setattr(S3FileSystem, "_cat_file", piece)
    place = RemoteFolder(f"s3://{bucket.bucket}/data/", options, tries=2)
    place.download(NAME, tmp_path / "got", expected_size=SIZE, deadline_s=30)
    assert (tmp_path / "got").read_bytes() == raw_bytes(0, SIZE)
    assert (read.count(0), read.count(9_000), read.count(18_000)) == (1, 1, 2)
    place.close()


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that lets the environment name a place of credentials, and one that changes them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    place = tmp_path / "credentials"

    def rotate(key: str, where: str) -> None:
        fields = {"AccessKeyId": key, "SecretAccessKey": "secret"}
        if where == "file":
            place.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\n")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place))
        elif where == "process":
            place.write_text(json.dumps({"Version": 1, **fields}))
            (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {place}\n")
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        else:
            place.write_text(json.dumps({**fields, "Token": "token", "Expiration": "2100-01-01T00:00:00Z"}))
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.url}/credentials")

    with ShardServer(tmp_path) as container:
        yield rotate


@pytest.mark.parametrize("where", ["file", "process", "container"])
def test_credentials_that_rotate_are_looked_for_again(
    bucket: Any, server: S3Server, signed: Any, where: str, tmp_path: Path
) -> None:
    signed("AKIAOLD", where)
    place = RemoteFolder(f"s3://{bucket.bucket}/data", {"client_kwargs": server.options["client_kwargs"]}, tries=1)
    with closing(place):
        assert place.size(NAME, deadline_s=30) == SIZE
        signed("AKIANEW", where)
        server.fail(S3Fault("", 403, "ExpiredToken", key="AKIAOLD"))
        place.download(NAME, tmp_path / "got", expected_size=SIZE, deadline_s=30)
        assert (tmp_path / "got").read_bytes() == raw_bytes(0, SIZE)
        server.fail(S3Fault("", 403, "ExpiredToken"))
        server.requests()
        with pytest.raises(ShardUnavailableError, match=r"after 1 try: access is denied \(ExpiredToken\)"):
            place.read_range(NAME, 0, 10, deadline_s=30)
        assert len(server.requests()) == 2  # once more, and no further
        signed("AKIATHIRD", where)
        server.fail()
        assert place.size(NAME, deadline_s=30) == SIZE
    server.fail()


def test_stored_with_an_encoding(bucket: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """As `aws s3 cp --content-encoding gzip` leaves it: the bytes are compressed, and the name does not say so."""
    rows = b"".join(b'{"n": %d}\n' % number for number in range(1000))
    (tmp_path / "a.jsonl").write_bytes(rows)
    index_folder(tmp_path)
    bucket.put(f"{tmp_path}/", f"{bucket.bucket}/packed/", recursive=True)
    packed = gzip.compress(rows)
    bucket.call_s3("put_object", Bucket=bucket.bucket, Key="packed/a.jsonl", Body=packed, ContentEncoding="gzip")
    address = f"s3://{bucket.bucket}/packed"
    named = pytest.raises(DatasetError, match=r"a\.jsonl must arrive as it was indexed, .*Content-Encoding: gzip")
    with closing(StreamingDataset(address, tmp_path / "cache", storage_options=options)) as dataset, named:
        _ = dataset[0]
    with closing(RemoteFolder(address, options)) as place:
        assert place.read("a.jsonl", deadline_s=30) == packed  # as it is stored
    with pytest.raises(ShardCorruptError, match=r"a\.jsonl must be text, and is compressed"):
        index_folder(address, storage_options=options)


def test_what_is_not_there(bucket: Any, options: dict[str, Any]) -> None:
    place = RemoteFolder(f"s3://{bucket.bucket}/data", options)
    says = rf"s3://{bucket.bucket}/data/none could not be fetched after 1 try: the file does not exist"
    with pytest.raises(ShardUnavailableError, match=says):
        place.read("none", deadline_s=30)
    place.close()
    place = RemoteFolder("s3://no-such-bucket/data", options)
    with pytest.raises(ShardUnavailableError, match="after 1 try: the file does not exist"):
        place.read("none", deadline_s=30)
    place.close()
